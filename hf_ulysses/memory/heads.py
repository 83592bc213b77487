"""Head-chunked attention: which chunks, found out once; core/attention.py does the work.

Source: https://arxiv.org/abs/2602.21196 (head-wise chunking, to 5M tokens).
"""

import logging

from ..core.heads import chunk_heads as chunks_of

logger = logging.getLogger(__name__)


def chunk_heads(model, attachment, chunks) -> list:
    """Exchange and attend with the heads of one of `chunks` chunks at a time. Returns a handle.

    Raises:
        ValueError: chunks that the heads of the model's configuration do not allow. Layers with other numbers of heads say so
            when they run.
    """
    config = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(config, "num_attention_heads", None)
    if isinstance(heads, int):
        kv_heads = getattr(config, "num_key_value_heads", None)
        found = chunks_of(heads, kv_heads if isinstance(kv_heads, int) else heads, attachment.size, chunks)
        logger.info("head_chunks: %d chunks of %d query heads.", len(found), found[0].num_query)
    return [_Chunked(attachment, chunks)]


class _Chunked:
    def __init__(self, attachment, chunks):
        self._attachment = attachment
        attachment.head_chunks = chunks

    def remove(self):
        self._attachment.head_chunks = 1
