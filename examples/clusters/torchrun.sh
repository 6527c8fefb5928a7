#!/usr/bin/env bash
# One training process group and several SGLang servers that already run, started by hand on machines of their own:
#
#   on each sampling machine:   python -m sglang.launch_server --model-path "$MODEL" --host ADDRESS --port 30000 --tp-size 8
#   on each training machine:   MODEL=… TRAIN=… SERVERS="http://10.0.0.5:30000 http://10.0.0.6:30000" \
#                               NODES=2 RANK_OF_NODE=0 MASTER=10.0.0.1 bash examples/clusters/torchrun.sh
#
# Servers open to a network want a key: start them with --api-key and give training the same one in SGLANG_API_KEY.
# Weights travel from rank 0 to each server over NCCL; ADDRESS_OF_RANK_0 is where servers find it.
# Further flags are added: torchrun.sh --num-rollout 10.
# LAUNCH replaces the launcher, for example to look at the command line: LAUNCH="printf %s\n".
set -euo pipefail
: "${MODEL:?directory of the Hugging Face checkpoint}" "${TRAIN:?prompt file}" "${SERVERS:?URLs of the servers}"
MASTER=${MASTER:-127.0.0.1}
TORCHRUN="torchrun --nnodes ${NODES:-1} --node-rank ${RANK_OF_NODE:-0} --master-addr $MASTER --master-port ${PORT:-29500}
   --nproc-per-node ${GPUS:-8} --shutdown-timeout 300"

# shellcheck disable=SC2086  # a launcher and a list of URLs are several words
exec ${LAUNCH:-$TORCHRUN} train.py \
   --hf-checkpoint "$MODEL" --prompt-data "$TRAIN" --input-key messages --label-key label --apply-chat-template \
   --rm-type math --num-rollout 500 --rollout-batch-size 128 --n-samples-per-prompt 8 --rollout-max-response-len 8192 \
   --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer --bf16 \
   --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 \
   --use-dynamic-batch-size --max-tokens-per-gpu 16384 --lr 1e-6 \
   --use-rollout-logprobs --use-rs --rs-level geometric --rs-lower-bound 0.95 --rs-upper-bound 1.05 \
   --rollout-engine sglang --sglang-url $SERVERS --sglang-sync-address "${ADDRESS_OF_RANK_0:-$MASTER}" \
   --rollout-lookahead 1 --output-dir "${OUT:-runs/cluster}" "$@"
