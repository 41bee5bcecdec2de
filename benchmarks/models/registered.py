"""Every architecture that transformers registers for the heads of the census."""

from typing import Any

from transformers.models.auto import modeling_auto

HEADS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "ctc": "MODEL_FOR_CTC_MAPPING_NAMES",
    "vision": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
}


def registered() -> list[tuple[str, str]]:
    """Distinct class names, each with the first head that it is registered for."""
    found: dict[str, str] = {}
    for head, table in HEADS.items():
        entries: dict[str, Any] = getattr(modeling_auto, table)
        for value in entries.values():
            for name in value if isinstance(value, list | tuple) else (value,):
                found.setdefault(name, head)
    return list(found.items())
