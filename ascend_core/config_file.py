"""Configuration files, flat or in the source documents' nested JSON form. Unknown keys are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ascend_core.errors import ConfigError, nearest

_PIPELINE_ALIASES = {"stage_num": "pipeline_parallel_size", "micro_batch_num": "num_microbatches"}
_TENSOR_ALIASES = {"split_num": "tensor_parallel_size", "qkv_split": "qkv_split"}
_ZERO_ALIASES = {
    "stage": "zero_stage",
    "partition_gradients": "partition_gradients",
    "contiguous_gradients": "contiguous_gradients",
    "overlap_gradients": "overlap_gradients",
}
_MODES = ("hybrid",)


def read_fields(path: str | Path, known: Sequence[str]) -> dict[str, Any]:
    """Read the fields that a YAML or JSON file sets.

    Args:
        path: A file ending in ``.json``, ``.yaml`` or ``.yml``.
        known: The field names.

    Returns:
        Field name to value, only for the fields that the file names.

    Raises:
        ConfigError: The file is missing, does not parse, is not a mapping, or has an unknown key.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"Cannot read the configuration file {path}.", str(error), "Give an existing file.") from error
    try:
        values = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} does not parse.", str(error), "Mend the file's syntax.") from error
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path} holds {type(values).__name__}, not a mapping.", "", "Write `key: value` lines.")
    return normalize_fields(values, str(path), known)


def normalize_fields(values: Mapping[str, Any], where: str, known: Sequence[str]) -> dict[str, Any]:
    """Turn user keys, flat or in the source documents' nested form, into field names.

    The nested form is ``{"parallel_mode": "hybrid", "pipeline_config": {"stage_num": 4, "micro_batch_num": 8},
    "tensor_parallel": {"qkv_split": "column", "split_num": 4}, "zero": {"stage": 1, "partition_gradients": true,
    "contiguous_gradients": true}}``. It names no schedule, and its own example has fewer
    microbatches than stages, which 1F1B cannot run; such a file means GPipe, which then holds as many activations as
    1F1B would.

    Args:
        values: The keys and values as the user wrote them.
        where: Their origin, for messages.
        known: The field names.

    Returns:
        Field name to value.

    Raises:
        ConfigError: An unknown key, or one field given under two names.
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if key == "parallel_mode":
            if value not in _MODES:
                raise ConfigError(f"{where}: parallel_mode={value!r}.", "Only the hybrid mode exists.", "Use 'hybrid'.")
        elif key == "pipeline_config":
            _merge(flat, _rename(value, _PIPELINE_ALIASES, f"{where}: pipeline_config"), where)
        elif key == "tensor_parallel":
            _merge(flat, _rename(value, _TENSOR_ALIASES, f"{where}: tensor_parallel"), where)
        elif key == "zero":
            _merge(flat, _rename(value, _ZERO_ALIASES, f"{where}: zero"), where)
        else:
            _merge(flat, {key: value}, where)
    if "pipeline_config" in values and "schedule" not in flat:
        stages, parts = flat.get("pipeline_parallel_size", 1), flat.get("num_microbatches", "auto")
        if isinstance(stages, int) and isinstance(parts, int) and parts < stages:
            flat["schedule"] = "GPipe"
    nested = ("parallel_mode", "pipeline_config", "tensor_parallel", "zero")
    for key in flat:
        if key not in known:
            raise ConfigError(
                f"{where}: unknown key {key!r}.", "Unknown keys are never ignored.", nearest(str(key), (*known, *nested))
            )
    return flat


def _rename(section: Any, aliases: Mapping[str, str], where: str) -> dict[str, Any]:
    if not isinstance(section, Mapping):
        raise ConfigError(f"{where} holds {type(section).__name__}, not a mapping.", "", f"Known keys: {', '.join(aliases)}.")
    renamed = {}
    for key, value in section.items():
        if key not in aliases:
            raise ConfigError(f"{where}: unknown key {key!r}.", "Unknown keys are never ignored.", nearest(str(key), aliases))
        renamed[aliases[key]] = value
    return renamed


def _merge(flat: dict[str, Any], new: Mapping[str, Any], where: str) -> None:
    for key, value in new.items():
        if key in flat and flat[key] != value:
            raise ConfigError(f"{where}: {key} is given twice, as {flat[key]!r} and {value!r}.", "", "Keep one of them.")
        flat[key] = value
