#!/usr/bin/env bash
# Qwen3-4B on GSM8K: Megatron on four GPUs, SGLang on the other four of one machine, samples up to a rollout stale,
# with token-level truncated importance sampling, geometric rejection by z-score and veto.
#
#   hf download openai/gsm8k --repo-type dataset --local-dir gsm8k
#   python examples/qwen3_gsm8k/prepare.py --parquet gsm8k/main/train-00000-of-00001.parquet --out /data/gsm8k/train.jsonl
#   python examples/qwen3_gsm8k/prepare.py --parquet gsm8k/main/test-00000-of-00001.parquet --out /data/gsm8k/test.jsonl
#   SGLANG_PYTHON=.venv-sglang/bin/python MODEL=/models/Qwen3-4B TRAIN=/data/gsm8k/train.jsonl EVAL=/data/gsm8k/test.jsonl bash examples/qwen3_gsm8k/run.sh
#
# SGLANG_PYTHON is the Python of the environment that has sglang. Further flags are added: run.sh --num-rollout 10.
# LAUNCH replaces the launcher, for example to look at the command line: LAUNCH="printf %s\n".
set -euo pipefail
: "${MODEL:?directory of the Hugging Face checkpoint}" "${TRAIN:?prompt file}" "${EVAL:?held-out prompt file}"
OUT=${OUT:-runs/qwen3_gsm8k}

CKPT_ARGS=(
   --hf-checkpoint "$MODEL"
   --load "$OUT/checkpoints"
   --save "$OUT/checkpoints"
   --save-interval 20
   --save-retain 2
)

ROLLOUT_ARGS=(
   --prompt-data "$TRAIN"
   --input-key messages
   --label-key label
   --apply-chat-template
   --rollout-shuffle
   --rm-type math
   --num-rollout 500
   --rollout-batch-size 64
   --n-samples-per-prompt 8
   --rollout-max-prompt-len 1024
   --rollout-max-response-len 4096
   --rollout-temperature 1.0
   --rollout-lookahead 1
   --max-weight-staleness 4
)

EVAL_ARGS=(
   --eval-interval 20
   --eval-prompt-data gsm8k "$EVAL"
   --eval-max-response-len 4096
)

PERF_ARGS=(
   --tensor-model-parallel-size 2
   --sequence-parallel
   --use-distributed-optimizer
   --bf16
   --recompute-granularity full
   --recompute-method uniform
   --recompute-num-layers 1
   --use-dynamic-batch-size
   --max-tokens-per-gpu 16384
)

GRPO_ARGS=(
   --advantage-estimator grpo
   --eps-clip 0.2
   --eps-clip-high 0.28
)

CORRECTION_ARGS=(
   --use-tis
   --tis-upper-bound 2.0
   --use-rs
   --rs-level geometric
   --rs-z-score 3
   --rs-veto-threshold 1e-4
)

OPTIMIZER_ARGS=(
   --lr 1e-6
   --lr-decay-style constant
   --weight-decay 0.1
   --adam-beta2 0.98
)

# Two servers of two GPUs each, on the GPUs that training leaves free: the second begins two GPUs after the first.
SGLANG_ARGS=(
   --rollout-engine sglang
   --sglang-launch 2
   --sglang-tp-size 2
   --sglang-base-gpu-id 4
   --sglang-mem-fraction-static 0.85
   --sglang-weight-sync distributed
   --check-weight-sync
   ${SGLANG_PYTHON:+--sglang-python "$SGLANG_PYTHON"}
)

REPORT_ARGS=(
   --output-dir "$OUT"
   --use-tensorboard
)

exec ${LAUNCH:-torchrun --standalone --nproc-per-node 4} train.py \
   "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" "${PERF_ARGS[@]}" "${GRPO_ARGS[@]}" \
   "${CORRECTION_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${SGLANG_ARGS[@]}" "${REPORT_ARGS[@]}" "$@"
