"""Files that a run starts from, looked at before anything is built."""

import pytest

from tests.cli.conftest import configured, refusal


def test_empty_prompt_file_is_refused(base, tmp_path):
    (tmp_path / "train.jsonl").write_text("")
    assert "the file is empty" in refusal(base)


@pytest.mark.parametrize(("layers", "message"), [(2, None), (3, "must divide the 2 layers"), (99, "must divide the 2")])
def test_recomputation_in_chunks_that_do_not_divide_the_layers_is_refused(base, layers, message):
    line = f"{base}--recompute-granularity full --recompute-num-layers {layers} --recompute-method "
    assert configured(line + "block").megatron.recompute_num_layers == layers
    if message is None:
        configured(line + "uniform")
    else:
        assert message in refusal(line + "uniform")
