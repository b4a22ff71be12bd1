"""Which runner serves which device; each is imported only when it is chosen."""

from __future__ import annotations

from pathlib import Path

from services.compute.config import ComputeSettings
from services.compute.runner.protocol import Runner


def load_runner(folder: Path, settings: ComputeSettings) -> Runner:
    """Load the model in a folder onto the device that the settings name.

    Raises ModelError or ConfigError when the folder or the device does not allow it.
    """
    if settings.device == "sim":
        from services.compute.runner import sim

        return sim.load(folder, settings)
    from services.compute.runner.eager_limits import choose_device

    if choose_device(settings).type == "cuda":
        from services.compute.runner.cuda.toolchain import check_toolchain

        check_toolchain()
        from services.compute.runner.cuda.load import load_cuda

        return load_cuda(folder, settings)
    from services.compute.runner.eager import EagerRunner

    return EagerRunner.load(folder, settings)
