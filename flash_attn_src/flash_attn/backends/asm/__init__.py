"""Plans of AMD's assembly kernels."""
