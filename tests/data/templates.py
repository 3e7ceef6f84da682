"""Chat templates of three styles that models use, written for the tests."""

CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

HEADERS = (  # in the style of Llama 3
    "{{ bos_token }}"
    "{% for message in messages %}"
    "<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content | trim }}<|eot_id|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)

# in the style of Mistral: no system prompt, no header for the assistant, whose turns end with
# eos_token
INST = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message.role == 'user' and loop.index0 % 2 == 0 %}[INST] {{ message.content }} [/INST]"
    "{% elif message.role == 'assistant' and loop.index0 % 2 == 1 %} "
    "{{ message.content }}{{ eos_token }}"
    "{% else %}{{ raise_exception('roles must alternate user/assistant') }}"
    "{% endif %}"
    "{% endfor %}"
)

MARKED = (  # ChatML that says itself what is generated
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}"
    "<|im_start|>assistant\n{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
    "{{ '\n' }}"
    "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

LAST_TURN_DIFFERS = (  # what the assistant thought is written in the last turn only
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{% if loop.last %}<think></think>{% endif %}"
    "{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
