"""The versions that exist, the requested combination, and the plan of a wheel."""
