"""The check of a kernel's instructions after every compiler: hazards of the hardware that no run on the simulator
shows.
"""
