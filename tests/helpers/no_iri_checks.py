"""A plugin that is loaded before nbval. jsonschema then omits the check of IRIs, which compiles 38 grammars in each process."""

import sys

sys.modules["rfc3987_syntax"] = None
