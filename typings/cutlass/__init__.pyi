"""The device language of the kernels, without types.

CuTe-DSL rewrites the functions that it compiles: what its own annotations say of a value (an
integer, a tuple or a tensor, for one) is not what device code has in hand.
"""

from typing import Any

def __getattr__(name: str) -> Any: ...
