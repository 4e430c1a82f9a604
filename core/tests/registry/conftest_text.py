"""Sources of small plugins for the tests."""

_HEAD = """
from rabbet.contracts import register_attention_backend
from rabbet.contracts.attention import AttentionBackend
@register_attention_backend("{name}")
class Backend(AttentionBackend):
    @classmethod
    def supports(cls, query):
        return ()
    @classmethod
    def kv_layout(cls, spec):
        return None
    def build_metadata(self, batch):
        return None
    def forward({arguments}):
        return None
"""
ATTENTION_WITHOUT_METADATA = _HEAD.format(name="acme_flash", arguments="self, layer, q, k, v, kv_cache, out")
ONE_FILE = _HEAD.format(name="one_file", arguments="self, layer, q, k, v, kv_cache, metadata, out")
