"""Tests that need large trainers installed: `make frameworks` runs them, and there a missing one is an error."""

import os

collect_ignore_glob = [] if os.environ.get("GRADSTAT_FRAMEWORKS") == "1" else ["*"]
