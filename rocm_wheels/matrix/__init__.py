"""What exists, what is asked for, and the plan of one wheel."""
