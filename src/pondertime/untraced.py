"""Calls that ``torch.compile`` leaves as they are: how often a cell is called depends on the data.

Imported by the first call that is traced, since torch's compiler takes long to import.
"""

from typing import Any

import torch


@torch.compiler.disable(reason="the number of updates depends on the data")
def serve(net: Any, *args: Any) -> Any:
    return net._serve(*args)
