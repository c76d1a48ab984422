"""Facts about the package's build, its kernels and the machine."""
