"""The instructions of AMD GPUs: parsed, decoded to functions, executed by the waves of a work group."""
