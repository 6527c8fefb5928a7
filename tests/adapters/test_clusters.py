"""The Kubernetes manifest, by the schemas of Kubernetes: here because of their size."""

from pathlib import Path

import kubernetes_validate
import pytest
import yaml

MANIFEST = Path(__file__).parents[2] / "examples/clusters/kubernetes.yaml"


@pytest.mark.parametrize("version", ["1.31", "1.34"])
def test_kubernetes_accepts_the_manifest(version):
    documents = list(yaml.safe_load_all(MANIFEST.read_text()))
    assert [document["kind"] for document in documents] == [
        "Service",
        "Service",
        "StatefulSet",
        "Job",
    ]
    for document in documents:
        kubernetes_validate.validate(document, version, strict=True)
    documents[-1]["spec"]["completionmode"] = "Indexed"  # misspelled
    with pytest.raises(kubernetes_validate.ValidationError, match="completionmode"):
        kubernetes_validate.validate(documents[-1], version, strict=True)
