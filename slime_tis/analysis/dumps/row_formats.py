"""Formats of other projects' per-token dumps: the key of a row for each column of the table.

A row is one sample: a line of JSON, a row of a parquet file, or a sample in slime's `.pt` file.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from slime_tis.analysis.dumps.files import SLIME_NAMES
from slime_tis.analysis.dumps.table import (
    SAMPLE_COLUMNS,
    TEXT_COLUMNS,
    TOKEN_COLUMNS,
    Column,
    SampleParts,
)
from slime_tis.errors import quoted

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """The format of a project's rows."""

    source: str
    """Name of the project in the metadata."""
    identifying_keys: frozenset[str] = frozenset()
    """Keys that only rows in this format have."""
    columns: Mapping[str, str]
    """Key of the row for each column."""
    metadata: Mapping[str, Any]
    """Metadata of the tables."""
    prepare: Callable[[dict[str, Any], Path], None] = lambda row, path: None
    """Changes a row in place before its columns are read."""
    has_prompt: bool = False
    """Whether lists cover prompt and response. The response starts at the first token whose loss
    mask is not 0."""

    def parts(self, row: Row, path: Path) -> SampleParts:
        """Returns the sample in a row.

        Args:
            row: The row.
            path: File of the row; its name may hold the step.

        Raises:
            ValueError: a required key is missing, or a value has the wrong type or length.
        """
        row = dict(row)
        self.prepare(row, path)
        values = self._values(row)
        if self.has_prompt:
            values = _without_prompt(values)
        if "sample_loss_mask" in row and _number(row, "sample_loss_mask") <= 0:
            values["loss_mask"] = np.zeros(len(values["train_log_prob"]), np.uint8)
        return SampleParts(**values)

    def _values(self, row: Row) -> dict[str, Any]:
        """The values of the columns in a row."""
        required = {"train_log_prob", "rollout_log_prob"}
        if self.has_prompt:  # the mask separates prompt and response
            required.add("loss_mask")
        length = None  # of the training log-probs, which come first
        values: dict[str, Any] = {}
        for column, key in self.columns.items():
            if row.get(key) is None and column not in required:
                continue
            if column in TEXT_COLUMNS:
                # In slime's rows the prompt may be a list of messages.
                values[column] = None
                if isinstance(row[key], str):
                    values[column] = row[key]
            elif column in SAMPLE_COLUMNS:
                values[column] = _number(row, key, whole=column != "reward")
            elif column == "prompt":
                values[column] = _numbers(row, key)
            elif column in ("advantage", "rollout_worker") and _is_single(row[key]):
                values[column] = np.full(length or 0, _number(row, key))
            else:
                values[column] = _numbers(row, key, length)
            length = len(values["train_log_prob"])
        return values


def _is_single(value: Any) -> bool:
    """Whether a value holds for all tokens of a sample."""
    return not isinstance(value, list | Tensor | np.ndarray)


def _without_prompt(values: dict[str, Any]) -> dict[str, Any]:
    """The values of the response; token ids before it become the prompt."""
    mask = values["loss_mask"] > 0
    start = len(mask)
    if mask.any():
        start = int(mask.argmax())
    response = {}
    for name, value in values.items():
        response[name] = value
        if name in TOKEN_COLUMNS:
            response[name] = value[start:]
    response["prompt"] = None
    if "token" in values:
        response["prompt"] = values["token"][:start]
    if "rejected" in values:
        response["rejected"] = (response["rejected"] > 0) & mask[start:]
    return response


def _number_after(word: str, path: Path, *, first: int) -> int | None:
    """Returns the number after a word in a file's name, less `first`; None without one."""
    match = re.search(rf"{word}(\d+)", path.name)
    if match is None:
        return None
    return int(match[1]) - first


def _prepare_nemo_rl(row: dict[str, Any], path: Path) -> None:
    """Unpacks lists with one entry, and cuts padded token lists to `input_lengths` tokens."""
    keys = {*NEMO_RL_COLUMNS.values(), "filtered_rewards", "input_lengths", "sample_loss_mask"}
    for key in row.keys() & keys:
        if not isinstance(row[key], list) or len(row[key]) != 1:
            raise ValueError(f"has {key} that is not a list with one entry.")
        row[key] = row[key][0]
    length = len(_numbers(row, "prev_logprobs"))
    total = row.get("input_lengths", length)
    if not isinstance(total, int) or not 0 <= total <= length:
        raise ValueError(f"has input_lengths {quoted(total, 40)} but {length} prev_logprobs.")
    if isinstance(row.get("advantages"), list) and len(row["advantages"]) == 1:
        row["advantages"] = row["advantages"][0]  # one advantage for all tokens
    for key in NEMO_RL_COLUMNS.values():
        if isinstance(row.get(key), list):
            _numbers(row, key, length)
            row[key] = row[key][:total]
    row["rewards"] = row.get("filtered_rewards", row.get("rewards"))
    # NeMo-RL counts steps from 1, this program the optimizer steps before.
    row["step"] = _number_after("train_data_step", path, first=1)


def _prepare_prime_rl(row: dict[str, Any], path: Path) -> None:
    """`is_masked` marks tokens that the loss excludes. `rewards` repeats the sample's reward."""
    if isinstance(row.get("is_masked"), list) and None in row["is_masked"]:
        row["is_masked"] = None
    if row.get("rewards") is not None:
        rewards = _numbers(row, "rewards")
        row["rewards"] = None
        # nanmean warns about an array of only NaN.
        if np.isfinite(rewards).any():
            row["rewards"] = float(np.nanmean(rewards))


def _prepare_verl(row: dict[str, Any], path: Path) -> None:
    """Refuses generations that verl writes without the patch in docs/dumps.md."""
    missing = [name for name in ("old_log_probs", "rollout_log_probs") if row.get(name) is None]
    if missing:
        raise ValueError(
            f"is a generation of verl without {' and '.join(missing)}; the patch in docs/dumps.md"
            " adds them, or write JSONL with train_log_probs, rollout_log_probs and loss_mask."
        )


def _prepare_skyrl(row: dict[str, Any], path: Path) -> None:
    """Cuts the padding of SkyRL's batches, and splits the sequence into prompt and response."""
    if row.get("action_log_probs") is None:
        raise ValueError(
            "has no action_log_probs; SkyRL skips this forward pass for losses that do not use it,"
            " for example policy_loss_type=rollout_is"
        )
    if row.get("rollout_logprobs") is None:
        raise ValueError(
            "has no rollout_logprobs; SkyRL records them with generator.sampling_params.logprobs=1"
        )
    width = len(_numbers(row, "action_log_probs"))
    mask = _numbers(row, "response_mask", width) > 0
    sequence = _numbers(row, "sequences")
    attended = _numbers(row, "attention_mask") > 0
    if len(attended) != len(sequence):
        raise ValueError(f"has {len(attended)} attention_mask for {len(sequence)} sequences.")
    if len(sequence) < width:
        raise ValueError(f"has {len(sequence)} sequences for {width} entries of response_mask.")
    for key in ("action_log_probs", "rollout_logprobs", "loss_mask", "advantages"):
        if row.get(key) is not None:
            row[key] = _numbers(row, key, width)[mask]
    # The columns of response_mask are the last ones of the sequence. SkyRL pads on the left; until
    # 2026 it padded responses on the right. Both leave the response where the mask is 1.
    start = len(sequence) - width
    is_response = np.zeros(len(sequence), np.bool_)
    is_response[start:] = mask
    row["tokens"] = sequence[is_response]
    row["prompt"] = sequence[attended & ~is_response]
    # SkyRL counts steps from 1, this program the optimizer steps before.
    row["step"] = _number_after("global_step_", path, first=1)


def _prepare_areal(row: dict[str, Any], path: Path) -> None:
    """Cuts the padding on the right, and aligns `prox_logp` with its tokens."""
    if row.get("prox_logp") is None:
        raise ValueError(
            "has no prox_logp; AReaL computes it with actor.use_decoupled_loss=true or"
            " actor.recompute_logprob=true, but not with a prox_logp_method without forward pass"
        )
    if "kl_rewards" in row:
        raise ValueError(
            "was written after compute_advantages, which shifts loss_mask and logprobs and may"
            " replace logprobs by prox_logp; write it before (docs/dumps.md)"
        )
    padded_length = len(_numbers(row, "prox_logp"))
    attended = _numbers(row, "attention_mask", padded_length) > 0
    length = int(attended.sum())
    # AReaL pads on the right (areal/utils/data.py, pad_sequences_to_tensors). With other padding
    # the cut below would take other tokens.
    if not attended[:length].all():
        raise ValueError(
            "has an attention_mask with 0 before 1; write the batch as AReaL's trainer has it, with"
            " padding only on the right"
        )
    for key in ("input_ids", "loss_mask", "logprobs", "versions"):
        if row.get(key) is not None:
            row[key] = _numbers(row, key, padded_length)[:length]
    # AReaL's forward pass labels each position with the next token (torch.roll of input_ids by -1
    # in areal/engine/fsdp_engine.py), while the rollout's log-probs are at their own token.
    next_token = _numbers(row, "prox_logp")
    row["prox_logp"] = np.concatenate([[np.nan], next_token[: max(length - 1, 0)]])[:length]
    row["step"] = _number_after("version_", path, first=0)


def _prepare_slime(row: dict[str, Any], path: Path) -> None:
    """`tokens` covers prompt and response; log-probs cover the response."""
    length = int(row["response_lengths"])
    for key in ("log_probs", "rollout_log_probs"):
        if row.get(key) is None:
            raise ValueError(
                f"has no {key}; slime saves both with --use-tis or --get-mismatch-metrics"
            )
    entries = len(row["log_probs"])
    if entries != length:
        raise ValueError(
            f"has {entries} entries of log_probs for {length} response tokens; if they are slices"
            " of context-parallel ranks, write the dump with a newer slime, which joins them"
        )
    row.setdefault("train_log_prob", row["log_probs"])
    if not isinstance(row.get("weight_versions"), Tensor):
        row["weight_versions"] = None
    row["rewards"] = row.get("local_raw_reward", row.get("rewards"))
    row["sample_index"] = row.get("sample_index", row.get("sample_indices"))
    if row.get("tokens") is not None:
        tokens = _numbers(row, "tokens")
        row["prompt_ids"], row["token"] = np.split(tokens, [len(tokens) - length])


PROJECTS = ("plain", "nemo_rl", "prime_rl", "verl")
"""Order of the keys in COLUMN_KEYS."""
COLUMN_KEYS = {
    "train_log_prob": ("train_log_probs", "prev_logprobs", "trainer_logprobs", "old_log_probs"),
    "old_log_prob": ("old_log_probs", "", "", ""),
    "rollout_log_prob": (
        "rollout_log_probs",
        "generation_logprobs",
        "inference_logprobs",
        "rollout_log_probs",
    ),
    "loss_mask": ("loss_mask", "token_loss_mask", "loss_mask", "response_mask"),
    "token": ("tokens", "token_ids", "token_ids", "responses"),
    "rejected": ("", "", "is_masked", ""),
    "advantage": ("advantages", "advantages", "advantages", "advantages"),
    "entropy": ("entropy", "", "entropy", ""),
    "weight_version": ("weight_versions", "", "", ""),
    "rollout_worker": ("rollout_workers", "", "", ""),
    "prompt": ("prompt", "", "", ""),
    "reward": ("reward", "rewards", "rewards", "score"),
    "step": ("step", "step", "step", "step"),
    "group": ("group", "", "", ""),
    "text": ("response", "", "", "output"),
    "prompt_text": ("prompt_text", "", "", "input"),
}
"""Keys per column, in the order of PROJECTS; empty if the project lacks the column."""


def _columns(project: str) -> dict[str, str]:
    """Returns a project's key for each column that it has."""
    index = PROJECTS.index(project)
    return {column: keys[index] for column, keys in COLUMN_KEYS.items() if keys[index]}


NEMO_RL_COLUMNS = _columns("nemo_rl")
SKYRL_COLUMNS = {
    "train_log_prob": "action_log_probs",
    "rollout_log_prob": "rollout_logprobs",
    "loss_mask": "loss_mask",
    "token": "tokens",
    "advantage": "advantages",
    "prompt": "prompt",
    "step": "step",
}
AREAL_COLUMNS = {
    "train_log_prob": "prox_logp",
    "rollout_log_prob": "logprobs",
    "loss_mask": "loss_mask",
    "token": "input_ids",
    "weight_version": "versions",
    "reward": "rewards",
    "step": "step",
}
FORMATS = (
    # NVIDIA-NeMo/RL, nemo_rl/algorithms/grpo.py ("Log training data"), utils/logger.py
    # log_batched_dict_as_jsonl
    RowFormat(
        source="nemo_rl",
        identifying_keys=frozenset({"prev_logprobs", "generation_logprobs"}),
        columns=NEMO_RL_COLUMNS,
        metadata={"old_policy": "recomputed"},
        prepare=_prepare_nemo_rl,
        has_prompt=True,
    ),
    # PrimeIntellect-ai/prime-rl, src/prime_rl/trainer/rl/token_export.py, TokenExporter,
    # schema_version 1
    RowFormat(
        source="prime_rl",
        identifying_keys=frozenset({"trainer_logprobs", "inference_logprobs"}),
        columns=_columns("prime_rl"),
        metadata={"old_policy": "current", "criteria": ["is_masked"]},
        prepare=_prepare_prime_rl,
        has_prompt=True,
    ),
    RowFormat(
        source="plain",
        identifying_keys=frozenset({"train_log_probs"}),
        columns=_columns("plain"),
        metadata={"old_policy": "current"},
    ),
    # verl-project/verl, verl/trainer/ppo/ray_trainer.py, _write_generations, with the patch in
    # docs/dumps.md
    RowFormat(
        source="verl",
        identifying_keys=frozenset({"input", "output", "score"}),
        columns=_columns("verl"),
        metadata={"old_policy": "recomputed"},
        prepare=_prepare_verl,
    ),
    # NovaSky-AI/SkyRL at a9564572, skyrl/backends/skyrl_train/training_batch.py, TrainingInput, as
    # skyrl/train/trainer.py, dump_data, pickles it; the script in docs/dumps.md writes the rows.
    # The layout with right-padded responses: skyrl-train/skyrl_train/dataset/preprocess.py at
    # 6dc221fc~1, convert_prompts_responses_to_batch_tensors.
    RowFormat(
        source="skyrl",
        identifying_keys=frozenset({"sequences", "response_mask"}),
        columns=SKYRL_COLUMNS,
        metadata={"old_policy": "recomputed"},
        prepare=_prepare_skyrl,
    ),
    # inclusionAI/AReaL at 4aef98d8: the batch that areal/workflow/rlvr.py returns, to which
    # areal/trainer/rl_trainer.py adds prox_logp; the patch in docs/dumps.md writes the rows.
    RowFormat(
        source="areal",
        identifying_keys=frozenset({"input_ids", "attention_mask", "logprobs"}),
        columns=AREAL_COLUMNS,
        metadata={"old_policy": "recomputed"},
        prepare=_prepare_areal,
        has_prompt=True,
    ),
)
"""Formats of rows. The first one whose identifying keys a row has is used."""
SLIME_COLUMNS = {
    name: SLIME_NAMES.get(name, name) for name in (*TOKEN_COLUMNS, *SAMPLE_COLUMNS, *TEXT_COLUMNS)
}
"""slime's key for each column; "prompt" is its key for the text, so ids have another one."""
SLIME = RowFormat(
    source="slime",
    columns={**SLIME_COLUMNS, "prompt": "prompt_ids"},
    metadata={"old_policy": "recomputed"},
    prepare=_prepare_slime,
)
"""Samples in `.pt` files of slime, miles and this program."""


AREAL_ROLLOUTS = (
    'AReaL\'s rollout files have no log-probs; the patch in docs/dumps.md ("Dumps from AReaL")'
    " writes its batches, which have them."
)
"""What users of AReaL's rollout.dump_to_file read."""


def format_of(row: Row) -> RowFormat:
    """Returns the format of a row.

    Raises:
        ValueError: no format has its keys.
    """
    for row_format in FORMATS:
        if row_format.identifying_keys <= row.keys():
            return row_format
    hint = "plain rows have train_log_probs, rollout_log_probs and loss_mask."
    if "rollout_log_probs" in row and row.keys() & {"response_ids", "response_length"}:
        hint = (
            "--save-debug-rollout-data has no training log-probs; --save-debug-train-data has them."
        )
    elif row.keys() >= {"head_version", "tail_version"}:
        # areal-project/AReaL at c569b5f2, areal/infra/workflow_executor.py, _dump_trajectory
        hint = AREAL_ROLLOUTS
    elif row.keys() >= {"input_prompt", "output_response"}:
        # skyrl/train/utils/trainer_utils.py, dump_per_dataset_eval_results
        hint = "SkyRL's evaluation files have no log-probs; trainer.dump_data_batch writes them."
    elif "step" in row and any("/" in str(key) for key in row):
        # metrics.jsonl of this program, whose name is also that of other programs' logs
        hint = "these are metrics; give the directory of the run."
    raise ValueError(f"has an unknown form, with the keys {quoted(sorted(map(str, row)))}; {hint}")


def _numbers(row: Row, key: str, length: int | None = None) -> Column:
    """A tensor or a list of numbers as an array; null is NaN."""
    values = row.get(key)
    if isinstance(values, Tensor):
        # numpy() refuses tensors that are conjugated lazily.
        numbers: Column = values.detach().resolve_conj().numpy()
    elif isinstance(values, np.ndarray):
        numbers = values
    elif isinstance(values, list):
        numbers = _array(values, key)
    else:
        raise ValueError(f"has {key} that is {quoted(values, 40)} but must be a list of numbers.")
    if length is not None and len(numbers) != length:
        raise ValueError(f"has {len(numbers)} entries of {key} but {length} log-probs.")
    return numbers


def _array(values: list[Any], key: str) -> Column:
    """A list of numbers as an array; null is NaN."""
    try:
        numbers = np.array(values)
        # null, or integers beyond 64 bits, give an array of objects.
        are_numbers = all(value is None or isinstance(value, int | float) for value in values)
        if numbers.dtype.kind == "O" and are_numbers:
            numbers = np.array(values, np.float64)
        if numbers.dtype.kind not in "fiub" or numbers.ndim != 1:
            raise ValueError
    except (ValueError, OverflowError):  # nested lists, text, or huge numbers
        raise ValueError(f"has {key} with an entry that is not a number of 64 bits.") from None
    return numbers


def _number(row: Row, key: str, *, whole: bool = False) -> Any:
    """The number of a key; with `whole`, an integer."""
    value = row[key]
    if isinstance(value, Tensor):
        value = value.item()
    if whole and not isinstance(value, int):
        raise ValueError(f"has {key} {quoted(value, 40)}, which is not a whole number.")
    if not isinstance(value, int | float):
        raise ValueError(f"has {key} {quoted(value, 40)}, which is not a number.")
    return value
