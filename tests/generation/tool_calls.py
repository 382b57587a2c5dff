"""Schemas of two tools, and what models of several families write when they call both."""

from __future__ import annotations

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome"]}, "days": {"$ref": "#/$defs/few"}, "exact": {"type": "boolean"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"few": {"type": "integer", "minimum": 0, "maximum": 9}},
}  # fmt: skip
CLOCK = {
    "type": "object",
    "properties": {"zone": {"enum": ["UTC"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
SCHEMAS = {"weather": WEATHER, "clock": CLOCK}

# By format: a text of the model, with its marks as special tokens where they are some.
SAID = {
    "gpt-oss": "<|channel|>commentary<|message|>Let me see.\n<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.clock <|constrain|>json<|message|>{"zone": "U}\\"T"}<|call|><|start|>assistant to=functions.weather'
    "<|channel|>commentary json<|message|>{}<|call|>",
    "tags": 'Let me see.\n<tool_call>\n<function=clock>\n<parameter=zone>\nU}"T\n</parameter>\n</function>\n'
    "</tool_call>\n<tool_call>\n<function=weather>\n</function>\n</tool_call>",
    "seed": 'Let me see.\n<seed:tool_call>\n<function=clock>\n<parameter=zone>U}"T</parameter>\n</function>\n'
    "</seed:tool_call>\n<seed:tool_call>\n<function=weather>\n</function>\n</seed:tool_call>",
    "glm 4.7": 'Let me see.\n<tool_call>clock<arg_key>zone</arg_key><arg_value>U}"T</arg_value></tool_call>'
    "<tool_call>weather</tool_call>",
    "glm 4.5": 'Let me see.\n<tool_call>clock\n<arg_key>zone</arg_key>\n<arg_value>U}"T</arg_value>\n</tool_call>\n'
    "<tool_call>weather\n</tool_call>",
    "hunyuan": 'Let me see.\n<tool_calls><tool_call>clock\n```json\n{"zone": "U}\\"T"}\n```</tool_call>\n'
    "<tool_call>weather\n```json\n{}\n```</tool_call></tool_calls>",
    "hunyuan list": 'Let me see.\n<tool_calls>[{"name": "clock", "arguments": {"zone": "U}\\"T"}}, '
    '{"name": "weather", "arguments": {}}]</tool_calls>',
    "lfm 2": "Let me see.\n<|tool_call_start|>[clock(zone='U}\"T'), weather()]<|tool_call_end|>",
    "gemma 4": 'Let me see.\n<|tool_call>call:clock{zone:<|"|>U}"T<|"|>}<tool_call|><|tool_call>call:weather{}'
    "<tool_call|>",
    "hermes": 'Let me see.\n<tool_call>\n{"name": "clock", "arguments": {"zone": "U}\\"T"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>',
    "mistral": 'Let me see.\n[TOOL_CALLS] [{"name": "clock", "arguments": {"zone": "U}\\"T"}}, '
    '{"name": "weather", "arguments": {}}]',
    "mistral 11": 'Let me see.\n[TOOL_CALLS]clock[ARGS]{"zone": "U}\\"T"}[TOOL_CALLS]weather[ARGS]{}',
    "phi 4": 'Let me see.\n<|tool_call|>[{"name": "clock", "arguments": {"zone": "U}\\"T"}}, '
    '{"name": "weather", "arguments": {}}]<|/tool_call|>',
    "llama 3": '<|python_tag|>{"name": "clock", "parameters": {"zone": "U}\\"T"}}; '
    '{"name": "weather", "parameters": {}}',
    "json": '{"name": "clock", "arguments": {"zone": "U}\\"T"}}\n{"name": "weather", "arguments": {}}',
}
EXPECTED = [("clock", '{"zone": "U}\\"T"}'), ("weather", "{}")]
