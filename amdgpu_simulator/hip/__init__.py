"""AMD's HIP runtime on a mock kernel driver (KFD): the simulator runs what a launch sends to the GPU."""
