"""The check of a kernel's instructions after every compiler: rules of the hardware that no simulator run shows."""
