"""The flight recorder: the last steps of a run as arrays, as a file, and compared to another run."""

from gradstat.recording.diff import TOLERANCE, Comparison, Divergence, compare
from gradstat.recording.file import LIMIT, SUFFIX, VERSION, RecordingFileError, load, save
from gradstat.recording.golden import Deviation, GoldenComparison
from gradstat.recording.recording import COLUMNS

__all__ = [
    "COLUMNS",
    "LIMIT",
    "SUFFIX",
    "TOLERANCE",
    "VERSION",
    "Comparison",
    "Deviation",
    "Divergence",
    "GoldenComparison",
    "RecordingFileError",
    "compare",
    "load",
    "save",
]
