"""What to compute: workflows, nodes, and the contract between stages. Pure Python."""

from leaderless.workflow.columns import COLUMNS, DATA_COLUMNS, DATA_RESPONSE_COLUMNS, Column
from leaderless.workflow.node import Node
from leaderless.workflow.read import (
    builtin_workflows,
    load_recipe,
    read_workflow,
    resolve_workflow,
    write_workflow,
)
from leaderless.workflow.stage import StageSpec, stage
from leaderless.workflow.stages import BUILTIN_STAGES, log_probs_column, spec_of
from leaderless.workflow.workflow import Workflow

__all__ = [
    "BUILTIN_STAGES",
    "COLUMNS",
    "DATA_COLUMNS",
    "DATA_RESPONSE_COLUMNS",
    "Column",
    "Node",
    "StageSpec",
    "Workflow",
    "builtin_workflows",
    "load_recipe",
    "log_probs_column",
    "read_workflow",
    "resolve_workflow",
    "spec_of",
    "stage",
    "write_workflow",
]
