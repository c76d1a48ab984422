"""Parts of models of the stand-in."""
