"""1 if the completion is JSON that fits a schema."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import jsonschema

from shared.config.builtin import JsonSchema
from shared.config.problems import bad
from shared.types.rewards import RewardRequest

FENCE = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)


class JsonSchemaScorer:
    def __init__(self, params: JsonSchema) -> None:
        self.params = params
        kind = jsonschema.validators.validator_for(params.json_schema, jsonschema.Draft202012Validator)
        try:
            kind.check_schema(params.json_schema)
        except jsonschema.SchemaError as error:
            raise bad("json_schema", error.instance, f"no JSON schema: {error.message}") from error
        self.validator = kind(params.json_schema)

    def score(self, rows: Sequence[RewardRequest]) -> list[float | None]:
        return [float(self._fits(row.completion)) for row in rows]

    def _fits(self, text: str) -> bool:
        found = FENCE.findall(text) if self.params.fenced else []
        try:
            value: Any = json.loads(found[-1] if found else text)
        except ValueError:
            return False
        return bool(self.validator.is_valid(value))
