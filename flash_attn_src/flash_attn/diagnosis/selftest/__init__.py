"""The selftest: calls of every kind against fp32, the speed of six shapes, and a report of both.

cases.py lists the calls. worker.py runs them in a process of its own, command.py reads its lines and writes the report.
"""
