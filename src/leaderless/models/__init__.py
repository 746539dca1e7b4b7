"""Loading and building models."""

from transformers.utils import logging

logging.disable_progress_bar()
