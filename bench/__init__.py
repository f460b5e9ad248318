"""Speed beside other libraries in one process: `python -m bench` from the root of the source tree.
"""
