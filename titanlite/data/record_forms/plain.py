"""The template of conversations where a tokenizer brings none: `data.chat_template = "plain"`.

    <BOS>System: Be brief.
    User: 1 + 1?
    Assistant: 2<EOS>
    User: and 2 + 2?
    Assistant: 4<EOS>

The loss is on the space before an answer, on the answer, and on EOS.
"""

SOURCE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if not loop.first %}{{ '\\n' }}{% endif %}"
    "{% if message.role == 'assistant' %}"
    "Assistant:{% generation %}{{ ' ' + message.content + eos_token }}{% endgeneration %}"
    "{% else %}"
    "{{ (message.role | capitalize) + ': ' + message.content }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}"
    "{% if messages %}{{ '\\n' }}{% endif %}Assistant:"
    "{% endif %}"
)
