"""The flight recorder: the last steps of a run as arrays, as a file, as a page, and compared to another run."""

from gradstat.recording.diff import TOLERANCE, Comparison, Divergence, compare
from gradstat.recording.file import LIMIT, SUFFIX, VERSION, RecordingFileError, load, save
from gradstat.recording.golden import Deviation, Golden, GoldenComparison
from gradstat.recording.recording import COLUMNS, Recording, Series
from gradstat.recording.view import ViewerMissingError, write_page

__all__ = [
    "COLUMNS",
    "LIMIT",
    "SUFFIX",
    "TOLERANCE",
    "VERSION",
    "Comparison",
    "Deviation",
    "Divergence",
    "Golden",
    "GoldenComparison",
    "Recording",
    "RecordingFileError",
    "Series",
    "ViewerMissingError",
    "compare",
    "load",
    "save",
    "write_page",
]
