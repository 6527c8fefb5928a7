#!/usr/bin/env bash
# Qwen3-30B-A3B on mathematical answers: Megatron on the eight GPUs of a machine, with routing replay (R3), token-level
# truncated importance sampling for what replay leaves over, and a veto.
#
#   MODEL=/models/Qwen3-30B-A3B TRAIN=/data/train.jsonl EVAL=/data/test.jsonl \
#   SERVERS="http://10.0.0.5:30000 http://10.0.0.6:30000" bash examples/qwen3_30b_a3b/run.sh
#
# NOT RUN by this project, which has had no GPUs: a test parses every flag against a small model of the same family.
#
# Memory: 30.5 billion parameters in bf16 with float32 gradients, master weights and Adam's moments take 18 bytes each,
# 549 GB or 69 GB on each of eight GPUs, and activations on top: GPUs of 141 GB. SGLang's servers have GPUs of their own
# and are started with --enable-return-routed-experts:
#
#   python -m sglang.launch_server --model-path "$MODEL" --host ADDRESS --port 30000 --tp-size 2 \
#     --enable-return-routed-experts
#
# and without --moe-runner-backend triton_kernel or flashinfer_trtllm, whose kernels bypass the recording.
# With GPUs of 192 GB one machine is enough: TRAIN_GPUS=4 and no SERVERS; the run starts two servers on the other four.
# SGLANG_PYTHON is the Python of the environment that has sglang, for TRAIN_GPUS=4. Further flags are added: run.sh --num-rollout 10.
# LAUNCH replaces the launcher, for example to look at the command line: LAUNCH="printf %s\n".
set -euo pipefail
: "${MODEL:?directory of the Hugging Face checkpoint}" "${TRAIN:?prompt file}" "${EVAL:?held-out prompt file}"
OUT=${OUT:-runs/qwen3_30b_a3b}
SERVERS=${SERVERS:-}
TRAIN_GPUS=${TRAIN_GPUS:-8}
if [ -z "$SERVERS" ] && [ "$TRAIN_GPUS" = 8 ]; then
   echo "run.sh: set SERVERS to the URLs of SGLang's servers, or TRAIN_GPUS=4 to start them beside the training" >&2
   exit 2
fi

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
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-prompt-len 1024
   --rollout-max-response-len 8192
   --rollout-temperature 1.0
)

EVAL_ARGS=(
   --eval-interval 20
   --eval-prompt-data held_out "$EVAL"
   --eval-max-response-len 8192
   --eval-engine rollout
)

# 128 experts: 16 on each of eight ranks. Attention and output layer are replicated, and their optimizer state sharded.
PERF_ARGS=(
   --tensor-model-parallel-size 1
   --pipeline-model-parallel-size 1
   --context-parallel-size 1
   --expert-model-parallel-size "$TRAIN_GPUS"
   --expert-tensor-parallel-size 1
   --use-distributed-optimizer
   --bf16
   --recompute-granularity full
   --recompute-method uniform
   --recompute-num-layers 1
   --use-dynamic-batch-size
   --max-tokens-per-gpu 10240
   --log-probs-chunk-size 1024
)

GRPO_ARGS=(
   --advantage-estimator grpo
   --eps-clip 0.2
   --eps-clip-high 0.28
)

# Replay takes the experts that the servers chose; the rest of the mismatch is corrected. Every 50th step is computed
# without replay, too, for the log.
CORRECTION_ARGS=(
   --use-rollout-routing-replay
   --measure-routing-mismatch 50
   --use-tis
   --tis-upper-bound 2.0
   --rs-veto-threshold 1e-4
)

OPTIMIZER_ARGS=(
   --lr 1e-6
   --lr-decay-style constant
   --weight-decay 0.1
   --adam-beta2 0.98
)

SGLANG_ARGS=(--rollout-engine sglang --sglang-weight-sync distributed --check-weight-sync)
if [ -n "$SERVERS" ]; then
   # shellcheck disable=SC2206  # a list of URLs is several words
   SGLANG_ARGS+=(--sglang-url $SERVERS --sglang-sync-address "${ADDRESS_OF_RANK_0:-127.0.0.1}")
else
   SGLANG_ARGS+=(--sglang-launch 2 --sglang-tp-size 2 --sglang-base-gpu-id "$TRAIN_GPUS")
   SGLANG_ARGS+=(--sglang-mem-fraction-static 0.8 ${SGLANG_PYTHON:+--sglang-python "$SGLANG_PYTHON"})
fi

REPORT_ARGS=(
   --output-dir "$OUT"
   --use-tensorboard
)

exec ${LAUNCH:-torchrun --standalone --nproc-per-node "$TRAIN_GPUS"} train.py \
   "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" "${PERF_ARGS[@]}" "${GRPO_ARGS[@]}" \
   "${CORRECTION_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${SGLANG_ARGS[@]}" "${REPORT_ARGS[@]}" "$@"
