"""The trainer: Megatron-core trains, SGLang or an in-process engine samples."""
