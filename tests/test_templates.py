"""A chat template is a program of somebody else: it is rendered as transformers does it, and it cannot run away."""

import json
import time

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from trailmark import template_worker, templates
from trailmark.chat import CHATML, PLAIN, PLAIN_BOS, Conversation, render, sequences
from trailmark.errors import DataError, ModelError
from trailmark.models.tiny import tiny_tokenizer
from trailmark.template_size import bound
from trailmark.templates import TemplateLimit, TemplateProblem, apply_template
from trailmark.texts import controls_of

TALK = [
    {"role": "system", "content": "Be\u2028brief. \x00'\"\\ \U0001f600"},
    {"role": "user", "content": "One {{ two }} <|im_end|>"},
    {"role": "assistant", "content": " Thought </think> three ", "reasoning": "since"},
    {"role": "user", "content": "?", "name": "me"},
]
# Templates in the manner of published ones.
SYSTEM_FIRST = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] | trim + '\\n\\n' %}"
    "{% set told = messages[1:] %}{% else %}{% set system = '' %}{% set told = messages %}{% endif %}{{ bos_token }}"
    "{% for m in told %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if loop.first %}{% set said = system + m['content'] %}{% else %}{% set said = m['content'] %}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + said.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + said.split('</think>')[-1] + eos_token }}{% endif %}{% endfor %}"
)
NAMESPACE = (
    "{%- set ns = namespace(last=0) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- macro say(m) %}{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}"
    "{%- endmacro %}{%- for m in messages %}{{ say(m) }}"
    "{% if m.reasoning_content and loop.index0 > ns.last %}!{% endif %}"
    "{%- endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n\n"
    "</think>{% endif %}{% endif %}"
)
USUAL = {"chatml": CHATML, "plain": PLAIN, "system": SYSTEM_FIRST, "namespace": NAMESPACE,
         "json": "{{ messages | tojson }}{{ messages }}{{ bos_token }}{{ eos_token }}"}  # fmt: skip
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HOSTILE = {
    "a loop": LOOP,
    "a loop in a filter": "{{ range(99999) | map('string') | map('list') | list | length }}" * 9 + LOOP,
    "a product": "{{ 'a' * 99999999999 }}",
    "a list": "{{ ([0] * 99999999999) | length }}",
    "a power": "{{ 9 ** (9 ** (9 ** 9)) }}",
    "a format": "{{ '%99999999999d' % 1 }}",
    "a format of another kind": "{{ '{:99999999999}'.format(1) }}",
    "white space": "{{ 'a' | center(99999999999) }}",
    "justified": "{{ 'a'.ljust(99999999999) }}",
    "doubling": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling without a loop": "{% set x = messages[0].content %}" + "{% set x = x ~ x %}" * 50 + "{{ x }}",
    "doubling in the loop": "{% for m in messages %}{% set x = 'ab' %}" + "{% set x = x + x %}" * 50 + "{% endfor %}",
    "doubling blocks": "{% set x %}ab{% endset %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 50,
    "doubling macros": "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}{{ " + "f(" * 50 + "'ab'" + ")" * 50 + " }}",
    "doubling replacements": "{% set x = 'aa' %}" + "{% set x = x.replace('a', 'aa') %}" * 50,
    "a long text": "{% for i in range(99999) %}" + "a" * 99 + "{% endfor %}",
    "latin": "{{ lipsum(n=99999999) }}",
    "a json of much white space": "{{ messages | tojson(indent=99999999999) }}",
}


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.mark.parametrize("name", USUAL)
@pytest.mark.parametrize("prompt", [False, True])
def test_every_way_gives_the_text_of_transformers(tokenizer, name, prompt, monkeypatch):
    template, asked = USUAL[name], {"tokenize": False, "add_generation_prompt": prompt}
    talk = TALK if name != "system" else TALK[1:]
    want = tokenizer.apply_chat_template(talk, chat_template=template, enable_thinking=False, **asked)
    assert apply_template(tokenizer, talk, prompt, template, {"enable_thinking": False}) == want
    monkeypatch.setattr(templates, "WORK", -1)  # in the process with limits
    assert apply_template(tokenizer, talk, prompt, template, {"enable_thinking": False}) == want


def test_usual_templates_need_no_process(tokenizer):
    assert all(map(bound, (CHATML, PLAIN, PLAIN_BOS, SYSTEM_FIRST, tokenizer.chat_template)))
    assert bound(NAMESPACE) is None is bound(LOOP)


@pytest.mark.usefixtures("hurried_templates")
class TestATemplateThatRunsAway:
    @pytest.mark.parametrize("name", HOSTILE)
    def test_is_ended(self, tokenizer, name):
        """Liveness only: each ends within its seconds of computing, whatever the machine does beside it."""
        with pytest.raises((TemplateLimit, TemplateProblem)) as caught:
            apply_template(tokenizer, TALK[:2], True, HOSTILE[name])
        assert "chat template" in str(caught.value) or isinstance(caught.value, TemplateProblem)
        assert apply_template(tokenizer, TALK, True) == tokenizer.apply_chat_template(
            TALK, tokenize=False, add_generation_prompt=True
        )


def test_a_template_takes_no_more_memory_than_it_may(tokenizer):
    """A text that any machine could hold, and that would not even be written."""
    with pytest.raises(TemplateLimit, match="more than 512 MB of memory"):
        apply_template(tokenizer, TALK, True, "{{ ('a' * 700000000) | length }}")


def test_the_library_says_what_is_wrong_in_one_sentence(tokenizer):
    own = tiny_tokenizer()
    own.chat_template = "{{ 'a' * 99999999999 }}"
    for use in (lambda: Conversation(own).prompt(), lambda: render(own, TALK), lambda: sequences(own, TALK)):
        with pytest.raises((ModelError, DataError), match="memory|needs a message"):
            use()
    assert controls_of(own).words  # a model with such a template can still be asked for completions
    with pytest.raises(DataError, match="refuses the messages .*division by zero"):
        render(tokenizer, TALK, template="{{ 1 / 0 }}")
    with pytest.raises(DataError, match="refuses the messages .*alternate"):
        render(tokenizer, TALK[1:2] * 2, template=SYSTEM_FIRST)


def test_a_template_cannot_read_what_is_not_given(tokenizer):
    for text in ("{{ messages.__class__.__mro__ }}", "{{ ''.__class__.__base__.__subclasses__() }}"):
        with pytest.raises(TemplateProblem):
            apply_template(tokenizer, TALK, True, text)


def test_a_special_token_of_a_megabyte_is_part_of_the_work(monkeypatch):
    """A tokenizer's own words go into the text too: once for each message, a thousand times a megabyte."""
    own, asked = tiny_tokenizer(), []
    own.bos_token = "b" * 1_000_000
    monkeypatch.setattr(templates.WORKER, "render", lambda *given: asked.append(given) or "")
    apply_template(own, TALK * 25, True, "{% for m in messages %}{{ bos_token }}{{ m.content }}{% endfor %}")
    assert asked


def test_a_process_that_fails_before_the_template_ran_is_replaced(tokenizer, monkeypatch):
    def broken(*_, **__):
        raise TypeError("__init__() missing 1 required positional argument: 'environment'")

    def asked(template):
        more = {"template": template, "messages": TALK, "prompt": True, "more": {}, "longest": 9999}
        return json.dumps(more).encode()

    assert template_worker._answer(broken, asked(NAMESPACE))["unfit"] == "TypeError"
    for template in ("{{ 1 / 0 }}", "{{ raise_exception('no') }}", "{% for %}", "{{ 1 + 'a' }}", "{{ ''() }}"):
        assert set(template_worker._answer(render_jinja_template, asked(template))) == {"problem"}
    real, answers = templates.WORKER.ask, [{"problem": "odd", "unfit": "TypeError"}]
    monkeypatch.setattr(templates.WORKER, "ask", lambda line: answers.pop() if answers else real(line))
    want = tokenizer.apply_chat_template(TALK, chat_template=NAMESPACE, tokenize=False, add_generation_prompt=True)
    assert apply_template(tokenizer, TALK, True, NAMESPACE) == want


def test_the_process_lives_on_between_renderings_and_ends_with_this_one(tokenizer):
    apply_template(tokenizer, TALK, True, NAMESPACE)
    first = templates.WORKER.process
    apply_template(tokenizer, TALK, True, NAMESPACE)
    assert templates.WORKER.process is first and first.poll() is None
    first.kill()
    first.wait(10)
    assert apply_template(tokenizer, TALK, True, NAMESPACE)  # another one is started
    second = templates.WORKER.process
    templates.WORKER.end()
    end = time.monotonic() + 20
    while second.poll() is None:
        assert time.monotonic() < end
