"""The demo: a small GPT learns Python from the standard library's sources, with every step checked.

Late in training one number in one layer is corrupted, and gradstat names the layer.
"""

from gradstat.demo.run import main

__all__ = ["main"]
