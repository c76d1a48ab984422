"""What the package knows of its own build, its kernels and the machine it runs on."""
