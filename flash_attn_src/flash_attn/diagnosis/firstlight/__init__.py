"""The first hour on a GPU: is it right, how fast is it, which kernels are best, and what are the GPU's latencies.

probes.py lists the microbenchmarks, bench.py times them, shapes.py has published shapes, providers.py compares kernels.
worker.py runs each part in a process of its own, command.py prints what they found and writes the report.
"""
