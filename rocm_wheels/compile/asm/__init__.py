"""AMD's assembly kernels, which come as code objects: a compiler that compiles nothing."""
