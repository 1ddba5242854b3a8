import re
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field

from trailmark.config import (
    Config,
    EngineConfig,
    LearnerConfig,
    LoraConfig,
    ModelConfig,
    ModelShape,
    OptimConfig,
    RunConfig,
    SamplingConfig,
    dump,
    load_recipe,
    resolve,
)
from trailmark.errors import RecipeError
from trailmark.methods import get_config


class Http(Config):
    kind: Literal["http"] = "http"
    url: str
    retries: int = 3


class Demo(RunConfig):
    method: Literal["demo"] = "demo"
    engine: Annotated[EngineConfig | Http, Field(discriminator="kind")] = EngineConfig()
    sampling: SamplingConfig = SamplingConfig()
    task: dict[str, Any] = Field({})


def load(folder, text: str, *overrides: str) -> Demo:
    file = folder / "a.yaml"
    file.write_text(text)
    return resolve(load_recipe(file, overrides), Demo)


def problems(folder, text: str | bytes, *overrides: str) -> list[str]:
    """The lines of the error, with the folder cut off."""
    file = folder / "a.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(RecipeError) as e:
        resolve(load_recipe(file, overrides), Demo)
    return str(e.value).replace(f"{folder}/", "").split("\n")


def test_defaults(tmp_path):
    c = load(tmp_path, "method: demo\n")
    assert c == Demo()
    assert (c.learner.optim.lr, c.learner.optim.betas, c.learner.micro_tokens) == (1e-4, (0.9, 0.95), None)
    assert (c.model.dtype, c.model.lora, c.engine.kind, c.checkpoint.keep_last) == ("float32", None, "local", 2)
    assert LoraConfig() == LoraConfig(rank=16, alpha=32.0, dropout=0.0, targets="all-linear")
    with pytest.raises(ValueError, match="frozen"):
        c.seed = 3


def test_numbers_of_every_spelling(tmp_path):
    text = "method: demo\nlearner: {optim: {lr: 1e-5, eps: 1.5E-8, weight_decay: .5, clip: 1}, micro_tokens: 1_000}\n"
    c = load(tmp_path, text, "learner.optim.final=5e-1", "learner.optim.betas=[0, 1e-1]", "learner.optim.warmup=10")
    o = c.learner.optim
    assert (o.lr, o.eps, o.weight_decay, o.clip, o.final, o.betas, o.warmup) == (
        1e-5,
        1.5e-8,
        0.5,
        1,
        0.5,
        (0, 0.1),
        10,
    )
    assert c.learner.micro_tokens == 1000


def test_extends_merges_mappings_and_replaces_lists(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "base.yaml").write_text(
        "method: demo\nseed: 1\nsampling: {top_k: 5, stop: [a, b]}\nengine: {kind: local, max_num_seqs: 4}\n"
    )
    (tmp_path / "sub/mid.yaml").write_text("extends: ../base.yaml\nseed: 2\nsampling: {stop: [c]}\n")
    c = load(tmp_path, "extends: sub/mid.yaml\nsampling: {top_p: 0.5}\n", "name=top", "engine.max_num_seqs=8")
    assert (c.seed, c.sampling.top_k, c.sampling.stop, c.sampling.top_p, c.name) == (2, 5, ["c"], 0.5, "top")
    assert c.engine == EngineConfig(max_num_seqs=8)
    # another kind does not inherit keys; the order of overrides does not matter
    c = load(tmp_path, "extends: sub/mid.yaml\n", "engine.url=u", "engine.kind=http")
    assert c.engine == Http(url="u")
    assert load(tmp_path, "extends: sub/mid.yaml\nmodel: {lora: {}}\n", "model.lora=null").model.lora is None
    assert load(tmp_path, "method: demo\n", "model.lora.rank=8", "seed=1", "seed=2") == Demo(
        model=ModelConfig(lora=LoraConfig(rank=8)), seed=2
    )


def test_extends_several_files(tmp_path):
    """Each file of the list wins over those before it, the file itself over all; two may extend a third one."""
    (tmp_path / "base.yaml").write_text("method: demo\nseed: 1\nname: base\nsampling: {top_k: 5}\n")
    (tmp_path / "b.yaml").write_text("extends: base.yaml\nseed: 2\nsampling: {top_p: 0.5}\n")
    (tmp_path / "c.yaml").write_text("extends: base.yaml\nname: c\nsampling: {temperature: 0.25}\n")
    c = load(tmp_path, "extends: [b.yaml, c.yaml]\nsteps: 7\n")
    assert (c.steps, c.name, c.seed) == (7, "c", 1)  # c.yaml holds all of base.yaml, so its seed is said last
    assert (c.sampling.top_k, c.sampling.top_p, c.sampling.temperature) == (5, 0.5, 0.25)
    assert load(tmp_path, "extends:\n- c.yaml\n- b.yaml\nseed: 9\n").seed == 9
    assert load(tmp_path, "extends: [c.yaml, b.yaml]\n").name == "base"
    (tmp_path / "c.yaml").write_text("extends: [base.yaml, a.yaml]\n")
    assert problems(tmp_path, "extends:\n- b.yaml\n- c.yaml\n") == [
        "c.yaml:1: key 'extends': 'extends' goes in a circle: a.yaml -> c.yaml -> a.yaml."
    ]
    (tmp_path / "c.yaml").write_text("sampling: {top_q: 1}\n")
    assert problems(tmp_path, "extends:\n- b.yaml\n- c.yaml\n") == [
        "c.yaml:1: key 'sampling.top_q': is not known. Did you mean 'top_p'?"
    ]
    assert problems(tmp_path, "extends:\n- b.yaml\n- zzzzzz\n") == [
        "a.yaml:3: key 'extends': zzzzzz: there is no such recipe."
    ]
    deep = [tmp_path / f"{k}.yaml" for k in range(30)]  # read once each, not 2^30 times
    for k, path in enumerate(deep):
        path.write_text(f"extends: [{k + 1}.yaml, {k + 1}.yaml]\n" if k < 29 else "method: demo\nseed: 3\n")
    assert load(tmp_path, "extends: 0.yaml\n").seed == 3


def test_a_text_may_name_other_keys(tmp_path):
    """The value of the finished recipe counts, whatever file or override it is from; a whole text keeps the type."""
    (tmp_path / "base.yaml").write_text("method: demo\nname: ${out}-${seed}\ntask: {path: '${out}/x', n: '${seed}'}\n")
    c = load(tmp_path, "extends: base.yaml\nout: runs/a\n", "seed=7")
    assert (c.name, c.task) == ("runs/a-7", {"path": "runs/a/x", "n": 7})
    c = load(tmp_path, "extends: base.yaml\nout: b\nseed: 1\n"
             "task: {same: '${learner.optim}', rate: '${task.same.lr}!'}\n"
             "learner: {optim: {lr: 0.5}}\n")  # fmt: skip
    assert c.task["same"] == {"lr": 0.5} and c.task["rate"] == "0.5!"
    c = load(tmp_path, "method: demo\nname: $${seed} $5 ${1} {seed}\n")  # these are texts
    assert c.name == "${seed} $5 ${1} {seed}"


NO_KEY = "names no key that this recipe sets. (To write ${ as text, write $${.)"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("name: a${otu}", f"'name': ${{otu}} {NO_KEY}"),
        ("name: ${seed.x}", f"'name': ${{seed.x}} {NO_KEY}"),
        ("name: ${out}\nout: x${name}", "'name': goes in a circle: out -> name -> out."),
        ("task: {a: {b: 1}, c: 'x${task.a}'}",
         "'task.c': ${task.a} is no text or number, so it cannot stand inside a text."),
    ],
)  # fmt: skip
def test_texts_that_name_no_key_are_one_sentence_each(tmp_path, line, said):
    assert problems(tmp_path, f"method: demo\n{line}\nseed: 1\n")[0] == f"a.yaml:2: key {said}"


@pytest.mark.parametrize(
    ("method", "line", "key", "meant"),
    [
        ("policy_gradient", "starts: 4", "starts", "prompts_per_step"),
        ("policy_gradient", "num_generations: 4", "num_generations", "n"),
        ("policy_gradient", "engine: {slots: 4}", "engine.slots", "max_num_seqs"),
        ("policy_gradient", "learner: {optim: {learning_rate: 0.1}}", "learner.optim.learning_rate", "lr"),
        ("lpr", "sample: {starts: 4}", "sample.starts", "prompts"),
        ("lpr", "complete: {k: 4}", "complete.k", "n"),
        ("lpr", "given: {pairs: x}", "given", "files"),
        ("reflect", "rl: {starts: 4}", "rl.starts", "prompts_per_step"),
    ],
)
def test_the_word_of_another_trainer_or_of_before_is_answered_with_ours(tmp_path, method, line, key, meant):
    (tmp_path / "a.yaml").write_text(f"method: {method}\n{line}\n")
    with pytest.raises(RecipeError) as e:
        resolve(load_recipe(tmp_path / "a.yaml"), get_config(method))
    assert f"a.yaml:2: key '{key}': is not known. Did you mean '{meant}'?" in str(e.value)


def test_unknown_keys_name_file_line_and_nearest(tmp_path):
    (tmp_path / "base.yaml").write_text("method: demo\nlearner:\n  optim:\n    lrr: 3\n")
    said = problems(
        tmp_path, "extends: base.yaml\nstepps: 4\nengine: {kind: local, max_num_seqz: 3}\n", "model.nam=x",
        "learner.optim.groups={head: {weight_decy: 1}}",
    )  # fmt: skip
    assert sorted(said) == [
        "a.yaml:2: key 'stepps': is not known. Did you mean 'steps'?",
        "a.yaml:3: key 'engine.max_num_seqz': is not known. Did you mean 'max_num_seqs'?",
        "base.yaml:4: key 'learner.optim.lrr': is not known. Did you mean 'lr'?",
        "override 'learner.optim.groups={head: {weight_decy: 1}}': key 'learner.optim.groups.head.weight_decy': "
        "is not known. Did you mean 'weight_decay'?",
        "override 'model.nam=x': key 'model.nam': is not known. Did you mean 'name'?",
    ]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("name: yes", "key 'name': expected text, found the boolean yes. Put it in quotes."),
        ("name: on", "key 'name': expected text, found the boolean on. Put it in quotes."),
        ("name: 12", "key 'name': expected text, found the whole number 12. Put it in quotes."),
        ("name: [a]", "key 'name': expected text, found a list."),
        ("name:", "key 'name': expected text, found nothing."),
        ("name: 2024-01-31", "key 'name': found the date 2024-01-31; put it in quotes if text is meant."),
        ("name: 2024-99-31", "key 'name': found the date 2024-99-31; put it in quotes if text is meant."),
        ("seed: 1.0", "key 'seed': expected a whole number, found the number 1.0."),
        ("seed: '1'", "key 'seed': expected a whole number, found the text '1'."),
        ("seed: 010", "key 'seed': expected a whole number, found the text '010'."),
        ("seed: 1:30", "key 'seed': expected a whole number, found the text '1:30'."),
        ("seed: true", "key 'seed': expected a whole number, found the boolean true."),
        ("model: {gradient_checkpointing: 1}", "key 'model.gradient_checkpointing': expected true or false, "
         "found the whole number 1."),
        ("sampling: {temperature: .nan}", "key 'sampling.temperature': expected a finite number, found the "
         "number .nan."),
        ("sampling: {top_p: 0}", "key 'sampling.top_p': expected greater than 0, found the whole number 0."),
        ("sampling: {top_p: 1.1}", "key 'sampling.top_p': expected less than or equal to 1, found the number 1.1."),
        ("sampling: {temperature: -1}", "key 'sampling.temperature': expected greater than or equal to 0, found the "
         "whole number -1."),
        ("sampling: {min_tokens: 99}", "key 'sampling': min_tokens 99 is more than max_tokens 64."),
        ("sampling: {stop: [a, 3]}", "key 'sampling.stop.1': expected text, found the whole number 3. Put it in "
         "quotes."),
        ("sampling: 3", "key 'sampling': expected a mapping, found the whole number 3."),
        ("model: {dtype: flaot32}", "key 'model.dtype': expected 'float32', 'bfloat16', 'float16' or 'float64', found "
         "the text 'flaot32'. Did you mean 'float32'?"),
        ("model: {lora: {targets: all_linear}}", "key 'model.lora.targets': expected 'all-linear' or a list, found the "
         "text 'all_linear'. Did you mean 'all-linear'?"),
        ("model: {device: gpu}", "key 'model.device': expected auto, cpu, cuda, mps or npu (or such as cuda:1), found "
         "the text 'gpu'."),
        ("model: {shape: {width: 10}}", "key 'model.shape': width 10 is not a multiple of heads 4."),
        ("model: {shape: {kv_heads: 3}}", "key 'model.shape': heads 4 is not a multiple of kv_heads 3."),
        ("learner: {optim: {betas: [1]}}", None),
        ("learner: {optim: {betas: [0.9, 1.0]}}", "key 'learner.optim.betas': expected two numbers from 0 to below 1, "
         "found [0.9, 1.0]."),
        ("learner: {optim: {warmup: 1.5}}", "key 'learner.optim.warmup': expected a fraction below 1 or a whole number "
         "of steps, found 1.5."),
        ("engine: {kind: locl}", "key 'engine': has the unknown 'kind' 'locl'. Did you mean 'local'?"),
        ("engine: {max_num_seqs: 3}", "key 'engine': needs a key 'kind' that says what it is: http, local."),
        ("engine: {kind: http}", "key 'engine.url': is missing."),
        ("engine: {kind: http, url: u, retries: x}", "key 'engine.retries': expected a whole number, found the "
         "text 'x'."),
        ("engine: {kind: http, url: u, retires: 1}", "key 'engine.retires': is not known. Did you mean 'retries'?"),
        ("seed: !!python/object/apply:os.system [ls]", "key 'seed': the YAML tag "
         "tag:yaml.org,2002:python/object/apply:os.system is not allowed here."),
        ("seed: !!int x", "key 'seed': 'x' is not a valid int."),
        ("seed: 1\nseed: 2", None),
        ("3: x", "a key '3' is not text; put it in quotes."),
        ("model: {no: x}", "a key 'model.no' is not text; put it in quotes."),
        ("[a, b]: x", "a key that is a list or mapping is not text; put it in quotes."),
        ("<<: {seed: 1}", "merge keys ('<<') are not supported; use 'extends' or write the keys out."),
    ],
)  # fmt: skip
def test_wrong_values_are_one_sentence_each(tmp_path, line, said):
    found = problems(tmp_path, f"# a comment\nmethod: demo\n{line}\n")
    if said is not None:
        assert found == [f"a.yaml:3: {said}"]
    else:
        assert len(found) == 1 and re.match(r"a.yaml:[34]: key '(seed' appears twice|learner.optim.betas)", found[0])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "a.yaml:1: a recipe is a mapping of keys to values; it is empty."),
        ("# only this\n", "a.yaml:1: a recipe is a mapping of keys to values; it is empty."),
        ("- a\n- b\n", "a.yaml:1: a recipe is a mapping of keys to values; found a list."),
        ("hello\n", "a.yaml:1: a recipe is a mapping of keys to values; found the text 'hello'."),
        ("a: 1\nmodel:\n\tname: x\n", "a.yaml:3: not valid YAML: found character '\\t' that cannot start any token "
         "(indent with spaces, not tabs)."),
        ("a: [1\n", "a.yaml:2: not valid YAML: expected ',' or ']', but got '<stream end>'."),
        ("a: 1\n---\nb: 2\n", "a.yaml:2: not valid YAML: but found another document."),
        (b"\x80\x02binary", "a.yaml: not a recipe: byte 0 is not UTF-8 text."),
        (b"method: caf\xe9\n", "a.yaml: not a recipe: byte 11 is not UTF-8 text."),
        (b"a: \x00\x01", "a.yaml: not valid YAML: special characters are not allowed."),
        (b" " * 2_000_000, "a.yaml: too large for a recipe (more than 1 MB)."),
        ("seed: 3\n", "a.yaml: key 'method': is missing; it names what is run, such as 'method: oreo'."),
        ("method: 3\n", "a.yaml:1: key 'method': expected text, found the whole number 3; it names what is run, "
         "such as 'method: oreo'."),
        ("seed: &x [*x]\n", "a.yaml:1: the recipe is too large, or too deep, once its anchors are filled in."),
        ("a: " + "[" * 2000, "a.yaml: nested too deeply."),
        ("extends: {b: 1}\n", "a.yaml:1: key 'extends': expected a file name or a list of them, found a mapping."),
        ("extends: []\n", "a.yaml:1: key 'extends': expected a file name or a list of them, found a list."),
        ("extends:\n- a.yaml\n", "a.yaml:2: key 'extends': 'extends' goes in a circle: a.yaml -> a.yaml."),
        ("seed: 1\nextends: aa.yaml\n", "a.yaml:2: key 'extends': aa.yaml: there is no such recipe. Did you mean "
         "'a.yaml'?"),
        ("extends: a.yaml\n", "a.yaml:1: key 'extends': 'extends' goes in a circle: a.yaml -> a.yaml."),
    ],
)  # fmt: skip
def test_files_that_are_no_recipes(tmp_path, text, said):
    assert problems(tmp_path, text) == [said]


def test_anchors_do_not_explode(tmp_path):
    laughs = "".join(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]\n" for i in range(1, 12))
    (said,) = problems(tmp_path, f"method: demo\nl0: &l0 [x]\n{laughs}")
    assert said.endswith("the recipe is too large, or too deep, once its anchors are filled in.")
    assert load(tmp_path, "method: demo\nname: &n foo\nout: *n\n").out == "foo"


def test_circles_through_other_files_and_missing_files(tmp_path):
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")
    assert problems(tmp_path, "method: demo\nextends: b.yaml\n") == [
        "b.yaml:1: key 'extends': 'extends' goes in a circle: a.yaml -> b.yaml -> a.yaml."
    ]
    with pytest.raises(RecipeError, match=r"a.yml: there is no such recipe. Did you mean 'a.yaml'\?"):
        load_recipe(tmp_path / "a.yml")
    with pytest.raises(RecipeError, match=r"cannot be read \(Is a directory\)"):
        load_recipe(tmp_path)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("seed", "override 'seed': expected key=value, such as learner.optim.lr=1e-4."),
        ("=3", "override '=3': expected key=value, such as learner.optim.lr=1e-4."),
        ("model..name=3", "override 'model..name=3': expected key=value, such as learner.optim.lr=1e-4."),
        ("seed=[1", "override 'seed=[1': not valid YAML: expected ',' or ']', but got '<stream end>'."),
        ("seed=x", "override 'seed=x': key 'seed': expected a whole number, found the text 'x'."),
        ("seed.x=1", "override 'seed.x=1': key 'seed': expected a whole number, found a mapping."),
        ("model.lora={rank: a}", "override 'model.lora={rank: a}': key 'model.lora.rank': expected a whole number, "
         "found the text 'a'."),
        ("extends=b.yaml", "override 'extends=b.yaml': 'extends' can only stand in a file."),
    ],
)  # fmt: skip
def test_bad_overrides(tmp_path, override, said):
    assert problems(tmp_path, "method: demo\nseed: 4\n", override) == [said]


def test_plain_mappings_can_be_resolved():
    assert resolve({"method": "demo", "seed": 3}, Demo) == Demo(seed=3)
    with pytest.raises(RecipeError, match=r"recipe: key 'sed': is not known. Did you mean 'seed'\?"):
        resolve({"method": "demo", "sed": 3}, Demo)


def test_dump_is_in_order_and_keeps_types(tmp_path):
    c = Demo(
        name="1e-5", out="yes", task={"a": "2024-01-01", "b": "010", "c": [1, 1.0, True, None, "=", "null", "ü\n"]}
    )
    text = dump(c)
    assert text.index("method:") < text.index("name:") < text.index("steps:") < text.index("model:")
    back = load(tmp_path, text)
    assert back == c and dump(back) == text
    assert [type(x) for x in back.task["c"]] == [int, float, bool, type(None), str, str, str]


# A recipe refuses NUL and half characters.
words = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=8) | st.from_regex(
    r"[-+.0-9eEx_:]{1,6}", fullmatch=True
)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False) | words,
    lambda x: st.lists(x, max_size=3) | st.dictionaries(words, x, max_size=3),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None)
@given(
    task=st.dictionaries(words, values, max_size=3),
    name=words,
    lr=st.floats(0, 1e30),
    groups=st.dictionaries(words, st.just({"lr": 0.5}), max_size=2),
    shape=st.none() | st.just(ModelShape(family="gpt2")),
)
def test_dump_loads_back(tmp_path_factory, task, name, lr, groups, shape):
    optim = OptimConfig(lr=lr, groups=groups)
    c = Demo(task=task, name=name, learner=LearnerConfig(optim=optim), model=ModelConfig(shape=shape))
    file = tmp_path_factory.getbasetemp() / "dumped.yaml"
    file.write_bytes(dump(c).encode())
    back = resolve(load_recipe(file), Demo)
    assert back == c and dump(back) == dump(c)


def test_a_union_that_names_no_discriminator_is_told_by_its_kind(tmp_path):
    """A method of one's own may have a section that is one of several, without saying how they are told apart."""

    class A(Config):
        kind: Literal["a"] = "a"
        path: str

    class B(Config):
        kind: Literal["b"] = "b"
        rubric: str = ""
        model: int = 0

    class Own(RunConfig):
        judge: A | B
        judges: list[A | B] = Field([])

    def said(judge):
        with pytest.raises(RecipeError) as problem:
            resolve({"method": "m", **judge}, Own)
        return str(problem.value)

    near = "recipe: key 'judge.rubrik': is not known. Did you mean 'rubric'?"
    assert said({"judge": {"kind": "b", "rubrik": "x"}}) == near
    number = "recipe: key 'judge.model': expected a whole number, found the text 'x'."
    assert said({"judge": {"kind": "b", "model": "x"}}) == number
    assert said({"judge": {"kind": "a"}}) == "recipe: key 'judge.path': is missing."
    assert "key 'judge.kind': expected 'a' or 'b', found the text 'c'." in said({"judge": {"kind": "c", "path": "x"}})
    assert said({"judge": {"kind": "b"}, "judges": [{"kind": "a"}]}) == "recipe: key 'judges.0.path': is missing."


def test_another_task_keeps_no_option_of_the_task_that_it_replaces(tmp_path):
    """A recipe of one's own extends one that came with Trailmark, and plays a task of its own."""
    (tmp_path / "base.yaml").write_text("method: lpr\ntask: {name: arith, options: {level: 2}}\nmodel: {name: tiny}\n")
    own = tmp_path / "own.yaml"
    own.write_text("extends: base.yaml\ntask: {name: logic, options: {path: q.jsonl}}\nmodel: {name: other}\n")
    assert load_recipe(own).raw["task"] == {"name": "logic", "options": {"path": "q.jsonl"}}
    own.write_text("extends: base.yaml\ntask: {name: logic}\n")
    assert load_recipe(own).raw["task"] == {"name": "logic"}
    own.write_text("extends: base.yaml\ntask: {options: {careless: 0.5}}\n")
    assert load_recipe(own).raw["task"] == {"name": "arith", "options": {"level": 2, "careless": 0.5}}
