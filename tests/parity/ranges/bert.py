"""XLM-RoBERTa and CamemBERT."""

FAMILIES = {"xlm-roberta": "XLMRoberta", "camembert": "Camembert"}


def sizes(family: str, r, common: dict) -> dict:
    """Those of a BERT."""
    return common
