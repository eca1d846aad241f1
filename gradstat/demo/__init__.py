"""The demo: a small GPT learns Python from the standard library's sources, with every step checked.

Then one number in one layer is corrupted, and gradstat says which.
"""

from gradstat.demo.run import main

__all__ = ["main"]
