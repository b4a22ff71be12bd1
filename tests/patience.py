"""How long a test waits for what has to come.

No test says how fast something is: a machine may have eight other things to do, or sleep. So all
waits are this long, which nobody has to wait out but for what never comes.
"""

from __future__ import annotations

PATIENCE_S = 240.0
