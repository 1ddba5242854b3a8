"""A home of eight places and six things, as the texts of a game. It is small enough to solve by hand.

loc 1 fridge 1 (shut): apple 1          loc 5 shelf 1: nothing; shelf 2: book 1
loc 2 microwave 1 (shut): nothing       loc 6 cabinet 1 (shut): apple 2
loc 3 sinkbasin 1: nothing              loc 7 desk 1: desklamp 1, bear 1 (which no place takes back)
loc 4 countertop 1: mug 1
"""

import json
import lzma

PLACES = {  # name: (location, openable)
    "fridge 1": (1, True), "microwave 1": (2, True), "sinkbasin 1": (3, False), "countertop 1": (4, False),
    "shelf 1": (5, False), "shelf 2": (5, False), "cabinet 1": (6, True), "desk 1": (7, False),
}  # fmt: skip
THINGS = {
    "apple 1": "fridge 1", "apple 2": "cabinet 1", "mug 1": "countertop 1", "book 1": "shelf 2",
    "desklamp 1": "desk 1", "bear 1": "desk 1",
}  # fmt: skip
FIXED = ("desklamp 1",)
NO_PLACE = ("bear",)
ERRANDS = {  # type: (sentence, thing, place, a shortest plan)
    "pick_and_place_simple": ("put a mug in cabinet", "mug", "cabinet",
        ["go to countertop 1", "take mug 1 from countertop 1", "go to cabinet 1", "open cabinet 1",
         "move mug 1 to cabinet 1"]),
    "look_at_obj_in_light": ("examine the book with the desklamp", "book", "desklamp",
        ["go to shelf 2", "take book 1 from shelf 2", "go to desk 1", "use desklamp 1"]),
    "pick_clean_then_place_in_recep": ("put a clean apple in shelf", "apple", "shelf",
        ["go to fridge 1", "open fridge 1", "take apple 1 from fridge 1", "go to sinkbasin 1",
         "clean apple 1 with sinkbasin 1", "go to shelf 1", "move apple 1 to shelf 1"]),
    "pick_heat_then_place_in_recep": ("heat some mug and put it in countertop", "mug", "countertop",
        ["go to countertop 1", "take mug 1 from countertop 1", "go to microwave 1", "heat mug 1 with microwave 1",
         "go to countertop 1", "move mug 1 to countertop 1"]),
    "pick_cool_then_place_in_recep": ("cool some mug and put it in shelf", "mug", "shelf",
        ["go to countertop 1", "take mug 1 from countertop 1", "go to fridge 1", "cool mug 1 with fridge 1",
         "go to shelf 1", "move mug 1 to shelf 1"]),
    "pick_two_obj_and_place": ("find two apple and put them in shelf", "apple", "shelf",
        ["go to fridge 1", "open fridge 1", "take apple 1 from fridge 1", "go to shelf 1", "move apple 1 to shelf 1",
         "go to cabinet 1", "open cabinet 1", "take apple 2 from cabinet 1", "go to shelf 1",
         "move apple 2 to shelf 1"]),
}  # fmt: skip

_AT = "(atLocation ?a ?l) (receptacleAtLocation ?r ?l)"
_REACH = "(or (not (openable ?r)) (opened ?r))"
_P = ":parameters (?a - agent ?l - location ?r - receptacle"


def _treat(name, able, kind, made, undone=""):
    return f"""(:action {name} {_P} ?o - object)
    :precondition (and ({able} ?o) (or (receptacleType ?r {kind})) {_AT} (holds ?a ?o))
    :effect (and ({made} ?o) {undone}))"""


DOMAIN = f"""(define (domain home)
(:requirements :adl :typing)
(:types agent location receptacle object rtype otype)
(:predicates (atLocation ?a - agent ?l - location) (receptacleAtLocation ?r - receptacle ?l - location)
  (openable ?r - receptacle) (opened ?r - receptacle) (inReceptacle ?o - object ?r - receptacle) (checked ?x)
  (receptacleType ?r - receptacle ?t - rtype) (canContain ?t - rtype ?o - otype) (objectType ?o - object ?t - otype)
  (holds ?a - agent ?o - object) (holdsAny ?a - agent) (isClean ?o - object) (cleanable ?o - object)
  (isHot ?o - object) (heatable ?o - object) (isCool ?o - object) (coolable ?o - object) (pickupable ?o - object)
  (toggleable ?o - object) (isToggled ?o - object))
(:action look :parameters (?a - agent ?l - location) :precondition (atLocation ?a ?l) :effect (checked ?l))
(:action inventory :parameters (?a - agent) :precondition () :effect (checked ?a))
(:action examineReceptacle {_P}) :precondition (and {_AT}) :effect (checked ?r))
(:action GotoLocation :parameters (?a - agent ?lStart - location ?lEnd - location ?r - receptacle)
    :precondition (and (atLocation ?a ?lStart) (receptacleAtLocation ?r ?lEnd))
    :effect (and (not (atLocation ?a ?lStart)) (atLocation ?a ?lEnd)))
(:action OpenObject {_P}) :precondition (and (openable ?r) {_AT} (not (opened ?r))) :effect (opened ?r))
(:action CloseObject {_P}) :precondition (and (openable ?r) {_AT} (opened ?r)) :effect (not (opened ?r)))
(:action PickupObject {_P} ?o - object)
    :precondition (and (pickupable ?o) {_AT} (inReceptacle ?o ?r) (not (holdsAny ?a)) {_REACH})
    :effect (and (not (inReceptacle ?o ?r)) (holds ?a ?o) (holdsAny ?a)))
(:action PutObject {_P} ?o - object ?ot - otype ?rt - rtype)
    :precondition (and (holds ?a ?o) {_AT} {_REACH} (objectType ?o ?ot) (receptacleType ?r ?rt) (canContain ?rt ?ot))
    :effect (and (inReceptacle ?o ?r) (not (holds ?a ?o)) (not (holdsAny ?a))))
{_treat("CleanObject", "cleanable", "SinkBasinType", "isClean")}
{_treat("HeatObject", "heatable", "MicrowaveType", "isHot", "(not (isCool ?o))")}
{_treat("CoolObject", "coolable", "FridgeType", "isCool", "(not (isHot ?o))")}
(:action ToggleObject {_P} ?o - object) :precondition (and (toggleable ?o) {_AT} (inReceptacle ?o ?r))
    :effect (isToggled ?o))
)
"""

_LIST = "[{o.indefinite + ' ' + o.name | inreceptacle(o:object, r:receptacle)}]"
_ROOM = "[{r.indefinite + ' ' + r.name | receptacleatlocation(r:receptacle, l:location)}]"
_FACING = "[{r.name | atlocation(a:agent, l:location) & receptacleatlocation(r:receptacle, l:location)}]"


def grammar(dialect="move", goal="UNKNOWN GOAL"):
    put, answer, arrive = {
        "move": ("move {o} to {r}", "You move the {o.name} to the {r.name}.", "{r.name}"),
        "put": ("put {o} in/on {r}", "You put the {o.name} in/on the {r.name}.", "loc 9"),
    }[dialect]
    here = "atlocation(a:agent, l:location) & receptacleatlocation(r:receptacle, l:location)"
    rules = {
        "intro": [{"rhs": "-= Welcome to TextWorld, ALFRED! =-\n\n#look.feedback#\n\n#task#"}],
        "task": [{"rhs": f"Your task is to: {goal}."}],
        "look.feedback": [
            {"condition": here, "rhs": f"You are facing the {_FACING}. Next to it, you see nothing."},
            {"rhs": f"You are in the middle of a room. Looking quickly around you, you see {_ROOM}."},
        ],
        "inside": [
            {
                "condition": "openable(r:receptacle) & opened(r:receptacle)",
                "rhs": f"The {{r.name}} is open. In it, you see {_LIST}.",
            },
            {"condition": "openable(r:receptacle)", "rhs": "The {r.name} is closed."},
            {"rhs": f"On the {{r.name}}, you see {_LIST}."},
        ],
        "carried": [
            {
                "condition": "holdsany(a:agent)",
                "rhs": "You are carrying: [{o.indefinite + ' ' + o.name | holds(a:agent, o:object)}].",
            },
            {"rhs": "You are not carrying anything."},
        ],
        "list_empty": [{"rhs": "nothing"}],
        "list_separator": [{"rhs": ", "}],
        "list_last_separator": [{"rhs": ", and "}],
    }
    words = {
        "look": ("look", "#look.feedback#"),
        "inventory": ("inventory", "#carried#"),
        "examineReceptacle": ("examine {r}", "#inside#"),
        "GotoLocation": (
            "go to [{r.name | receptacleatlocation(r:receptacle, lend:location)}]",
            f"You arrive at {arrive}. #inside#",
        ),
        "OpenObject": ("open {r}", "You open the {r.name}. #inside#"),
        "CloseObject": ("close {r}", "You close the {r.name}."),
        "PickupObject": ("take {o} from {r}", "You pick up the {o.name} from the {r.name}."),
        "PutObject": (put, answer),
        "CleanObject": ("clean {o} with {r}", "You clean the {o.name} using the {r.name}."),
        "HeatObject": ("heat {o} with {r}", "You heat the {o.name} using the {r.name}."),
        "CoolObject": ("cool {o} with {r}", "You cool the {o.name} using the {r.name}."),
        "ToggleObject": ("use {o}", "You turn on the {o.name}."),
    }
    actions = "".join(
        f'action {n} {{\n    template :: "{t}";\n    feedback :: "{f}";\n}}\n' for n, (t, f) in words.items()
    )
    return f'grammar :: """\n{json.dumps(rules, indent=1)}\n""";\n\n{actions}'


def _id(name):
    kind, number = name.split(" ")
    return f"{kind.removesuffix('basin')}_bar_{9 - int(number)}{'_basin' if kind.endswith('basin') else ''}"


def _kind(name):
    return name.split(" ")[0] + "Type"


def _goal(task_type, thing, place):
    o, r = f"(objectType ?o {thing}Type)", f"(receptacleType ?r {place}Type)"
    if task_type == "look_at_obj_in_light":
        return f"""(exists (?t - object ?r - receptacle ?a - agent ?l - location)
            (and (objectType ?t {place}Type) (toggleable ?t) (isToggled ?t) (receptacleAtLocation ?r ?l)
                 (atLocation ?a ?l) (inReceptacle ?t ?r)))
          (exists (?o - object ?a - agent) (and {o} (holds ?a ?o)))"""
    if task_type == "pick_two_obj_and_place":
        other = f"(exists (?p - object) (and (not (= ?o ?p)) (objectType ?p {thing}Type) {r} (inReceptacle ?p ?r)))"
        return f"(exists (?r - receptacle) (exists (?o - object) (and {o} {r} (inReceptacle ?o ?r) {other})))"
    more = {"pick_clean": "(cleanable ?o) (isClean ?o)", "pick_heat_": "(heatable ?o) (isHot ?o)",
            "pick_cool_": "(coolable ?o) (isCool ?o)"}.get(task_type[:10], "")  # fmt: skip
    return f"(exists (?r - receptacle) (exists (?o - object) (and {o} {r} {more} (inReceptacle ?o ?r))))"


def problem(task_type="pick_and_place_simple", things=THINGS):
    """The home with a goal of this type; `things` says where each thing lies at the start."""
    _, thing, place, _ = ERRANDS[task_type]
    kinds = sorted({_kind(t) for t in things})
    rtypes = sorted({_kind(p) for p in PLACES})
    locations = sorted({at for at, _ in PLACES.values()})
    lines = ["(define (problem small) (:domain home)", "(:objects", "agent1 - agent", "loc_bar_0 - location"]
    lines += [f"loc_bar_{n} - location" for n in locations]
    lines += [f"{_id(p)} - receptacle" for p in PLACES] + [f"{_id(t)} - object" for t in things]
    lines += (
        [f"{t} - rtype" for t in rtypes] + [f"{k} - otype" for k in sorted({*kinds, f"{thing}Type"})] + [")", "(:init"]
    )
    lines += ["(atLocation agent1 loc_bar_0)"]
    for p, (at, openable) in PLACES.items():
        lines += [f"(receptacleAtLocation {_id(p)} loc_bar_{at})", f"(receptacleType {_id(p)} {_kind(p)})"]
        lines += [f"(openable {_id(p)})"] if openable else []
    for t, p in things.items():
        lines += [f"(objectType {_id(t)} {_kind(t)})", f"(inReceptacle {_id(t)} {_id(p)})"]
        lines += [f"(toggleable {_id(t)})"] if t in FIXED else [f"({able} {_id(t)})" for able in _able(t)]
    lines += [f"(canContain {r} {k})" for r in rtypes for k in kinds if k.removesuffix("Type") not in NO_PLACE]
    return "\n".join([*lines, ")", f"(:goal (and {_goal(task_type, thing, place)}))", ")"])


def _able(thing):
    return ("pickupable", *(("cleanable", "heatable", "coolable") if thing.startswith(("apple", "mug")) else ()))


def game_file(task_type="pick_and_place_simple", dialect="move", things=THINGS, **changes):
    """The JSON of a game.tw-pddl."""
    sentence, _, _, walkthrough = ERRANDS[task_type]
    game = dict(pddl_domain=DOMAIN, grammar=grammar(dialect, sentence), pddl_problem=problem(task_type, things),
                walkthrough=walkthrough, solvable=True)  # fmt: skip
    return json.dumps({k: v for k, v in {**game, **changes}.items() if v is not None})


def names():
    return {t: f"{t}-{ERRANDS[t][1].title()}-None-{ERRANDS[t][2].title()}-1/trial_T1" for t in ERRANDS}


def write_download(root, splits=("train", "valid_seen"), dialect="move"):
    """The layout of a download: json_2.1.1/<split>/<task>/<trial>/game.tw-pddl, one game of each type."""
    for split in splits:
        for task_type, name in names().items():
            folder = root / "json_2.1.1" / split / name
            folder.mkdir(parents=True)
            (folder / "game.tw-pddl").write_text(game_file(task_type, dialect))
    return root


def packed_rows(split):
    for task_type, name in names().items():
        task, trial = name.split("/")
        sentence, _, _, walkthrough = ERRANDS[task_type]
        yield dict(split=split, task=task, trial=trial, task_type=task_type, task_desc=sentence,
                   walkthrough=walkthrough, pddl_problem=problem(task_type))  # fmt: skip


def write_packed(root, splits=("train", "valid_seen")):
    """The layout of packed files: games_<split>.jsonl.xz beside one domain and one grammar."""
    (root / "domain.pddl").write_text(DOMAIN)
    (root / "words.twl2").write_text(grammar())
    for split in splits:
        text = "".join(json.dumps(row) + "\n" for row in packed_rows(split))
        (root / f"games_{split}.jsonl.xz").write_bytes(lzma.compress(text.encode()))
    return root
