"""Chooses when to apply the patches: immediately, or right after the import of Megatron or of MindSpeed's adaptor.

`attach` may be called before the script's own imports. MindSpeed must patch Megatron first, so Megatron cannot be
imported here. Instead the patches are applied at the end of the import of MindSpeed's adaptor (which imports Megatron)
or, without MindSpeed, of `megatron.training`.
"""

from __future__ import annotations

import sys
from types import ModuleType

from mindspeed_rl_plugin.checks.taken_over import from_command_line
from mindspeed_rl_plugin.host.on_import import after_import, before_import
from mindspeed_rl_plugin.launch.patches import OF_MINDSPEED_LLM, PATCHES
from mindspeed_rl_plugin.launch.patching import BASE_ADAPTOR, MINDSPEED_ADAPTORS, apply, revert

TRAINING_MODULE = "megatron.training"

_finished: set[str] = set()  # adaptors whose import has ended


def attach() -> None:
    """Apply the patches as soon as they can be applied, and again after MindSpeed's adaptor."""
    for name in (BASE_ADAPTOR, *MINDSPEED_ADAPTORS):
        if name not in sys.modules:
            before_import(name, revert)
            before_import(name, from_command_line)
        after_import(name, _base_imported if name == BASE_ADAPTOR else _mindspeed_imported)
    after_import(TRAINING_MODULE, _megatron_imported)


def _mindspeed_imported(module: ModuleType) -> None:
    _finished.add(module.__name__)
    from_command_line(read_by=module.__name__)
    apply((*PATCHES, *(patch for patch in OF_MINDSPEED_LLM if patch.module in sys.modules)))


def _base_imported(module: ModuleType) -> None:
    _finished.add(module.__name__)
    from_command_line(read_by=module.__name__)
    if TRAINING_MODULE in sys.modules:  # else it is too early: MindSpeed's patches may follow
        _megatron_imported(module)


def _megatron_imported(module: ModuleType) -> None:
    # While an adaptor is imported, Megatron is only partly patched: wait for the end of this import.
    if not any(name in sys.modules and name not in _finished for name in (BASE_ADAPTOR, *MINDSPEED_ADAPTORS)):
        apply(PATCHES)
