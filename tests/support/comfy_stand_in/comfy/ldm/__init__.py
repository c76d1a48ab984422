"""Models of the stand-in."""
