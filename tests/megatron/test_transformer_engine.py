"""Whether transformer-engine computes the layers; it is a stand-in here, because its kernels need a GPU."""

import sys

import pytest

from slime_tis.trainer.megatron.parallel import trains_with_transformer_engine
from slime_tis.trainer.options.megatron import MegatronConfig

GOOD, BROKEN = "", "raise ImportError('libcudart.so.13: cannot open shared object file')"


@pytest.mark.parametrize(
    ("options", "has_gpu", "module", "answer"),
    [
        pytest.param({"bf16": True}, True, GOOD, True, id="bf16"),
        pytest.param({"fp16": True}, True, GOOD, True, id="fp16"),
        pytest.param({}, True, GOOD, False, id="float32"),
        pytest.param({"bf16": True}, False, GOOD, False, id="no GPU"),
        pytest.param({"bf16": True}, True, BROKEN, False, id="broken"),
        pytest.param({"bf16": True}, True, None, False, id="absent"),
        pytest.param({"bf16": True, "transformer_impl": "local"}, True, GOOD, False, id="local"),
        pytest.param({"bf16": True, "transformer_impl": "transformer_engine"}, True, GOOD, True, id="asked for"),
        pytest.param({"transformer_impl": "transformer_engine"}, True, GOOD, "float32", id="asked for in float32"),
        pytest.param({"bf16": True, "transformer_impl": "transformer_engine"}, True, BROKEN, "libcudart", id="asked"),
        pytest.param({"bf16": True, "transformer_impl": "transformer_engine"}, False, GOOD, "a GPU", id="asked on CPU"),
    ],
)
def test_transformer_engine_is_used_where_it_can_train(options, has_gpu, module, answer, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        monkeypatch.delitem(sys.modules, name)
    if module is not None:
        package = tmp_path / "transformer_engine"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "pytorch.py").write_text(module)
        monkeypatch.syspath_prepend(tmp_path)
    config = MegatronConfig(hf_checkpoint="model", **options)
    if isinstance(answer, bool):
        assert trains_with_transformer_engine(config, has_gpu=has_gpu) is answer
    else:
        with pytest.raises(ValueError, match=answer):
            trains_with_transformer_engine(config, has_gpu=has_gpu)
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        monkeypatch.delitem(sys.modules, name, raising=False)
