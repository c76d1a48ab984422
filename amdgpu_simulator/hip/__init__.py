"""AMD's own HIP runtime over a pretended driver: what a launch sends to a GPU arrives at the simulator."""
