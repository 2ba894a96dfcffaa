"""Nothing here is run without HookedTransformer, which TransformerLens 4 removed."""

from tl_devicefix.monkeypatch.versions import has_hooked_transformer

if not has_hooked_transformer():
    collect_ignore_glob = ["*"]
