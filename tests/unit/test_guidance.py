"""CLAUDE.md and its imports: what other programs read, within the agent's folder, and nothing that the agent wrote."""

import time
from pathlib import Path

import pytest

from halter.config.agent_files import parse_agent, read_agent
from halter.config.definition import definition_digest
from halter.config.guidance import MAX_IMPORT_WORDS, MAX_IMPORTS, read_guidance
from halter.config.merge import FleetConfig
from halter.config.resolve import resolve_agent
from halter.config.roots import definition_of
from halter.config.skill_files import read_skills
from halter.config.trust import digest_folder
from halter.config.yaml_reader import load_bytes


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def instructions_of(folder: Path, text: str = "") -> str:
    agent = parse_agent(load_bytes(f"name: desk\n{text}".encode(), "agent.yaml"))
    return resolve_agent(FleetConfig(), agent, folder).model_settings.instructions


def test_it_follows_the_words_of_the_file_and_of_agents_md(tmp_path: Path) -> None:
    write(tmp_path, **{"AGENTS.md": "Watch.\n", "CLAUDE.md": "Be brief.\n", ".claude/CLAUDE.md": "Be kind.\n"})
    assert instructions_of(tmp_path, "instructions: First.\n") == "First.\n\nWatch.\n\nBe brief.\n\nBe kind."


def test_what_it_imports_follows_under_its_name_once(tmp_path: Path) -> None:
    write(
        tmp_path,
        **{
            "CLAUDE.md": "Read @docs/style.md, and @docs/with\\ space.md#top.\n- @./docs/style.md\n",
            "docs/style.md": "Short lines. See @deep/more.md and @style.md.",
            "docs/deep/more.md": "More. @../../CLAUDE.md",
            "docs/with space.md": "Spaced.",
        },
    )
    guidance = read_guidance(tmp_path)
    assert guidance.files == ("CLAUDE.md", "docs/style.md", "docs/deep/more.md", "docs/with space.md")
    assert guidance.text.split("\n\n")[1:] == [
        *("Contents of docs/style.md:", "Short lines. See @deep/more.md and @style.md."),
        *("Contents of docs/deep/more.md:", "More. @../../CLAUDE.md"),
        *("Contents of docs/with space.md:", "Spaced."),
    ]
    assert guidance.notes == ()


@pytest.mark.parametrize(
    "text",
    [
        "```\n@a.md\n```",
        "~~~md\n@a.md\n~~~",
        "  ````\n@a.md\n```\n@a.md\n````",
        "```\n@a.md",
        "> ```\n> @a.md\n> ```",
        "Use `@a.md` or ``x @a.md``.",
        "<!--\n@a.md\n-->",
        "mail@a.md",
        "@nobody, @types/node, @/components and @a",
    ],
    ids=["fence", "tildes", "long fence", "open fence", "quoted", "span", "comment", "mail", "names"],
)
def test_what_only_looks_like_an_import_is_none(text: str, tmp_path: Path) -> None:
    write(tmp_path, **{"CLAUDE.md": text, "a.md": "Imported."})
    guidance = read_guidance(tmp_path)
    assert (guidance.files, guidance.notes) == (("CLAUDE.md",), ())


@pytest.mark.parametrize("text", ["".join("`" * ticks + "x" for ticks in range(1, 700)), "<!--" * 60_000])
def test_code_and_comments_without_an_end_are_read_in_no_time(text: str, tmp_path: Path) -> None:
    write(tmp_path, **{"CLAUDE.md": f"{text} @more.md", "more.md": "More."})
    started = time.process_time()
    assert "Contents of more.md" in instructions_of(tmp_path)
    assert time.process_time() - started < 2


def test_words_that_name_no_file_are_looked_up_once_each_and_only_so_many(tmp_path: Path) -> None:
    """A list of people or packages. Each word costs calls to the file system, so 100,000 took seconds."""
    write(tmp_path, **{"CLAUDE.md": "@ada " * 100_000 + "@more.md @other.md", "more.md": "More."})
    names = [f"@../{number}" for number in range(100_000)]
    write(tmp_path, **{"other.md": "Other. @last.md\n" + " ".join(names), "last.md": "Last."})
    started = time.process_time()
    guidance = read_guidance(tmp_path)
    assert time.process_time() - started < 2
    assert guidance.files == ("CLAUDE.md", "more.md", "other.md", "last.md")
    assert len(guidance.notes) < MAX_IMPORT_WORDS
    assert guidance.notes[-1] == (
        f"{tmp_path / 'other.md'}: @../1996 is not imported: at most 2,000 different words after @ are looked up."
    )


def test_agents_md_is_read_once_whoever_links_or_imports_it(tmp_path: Path) -> None:
    write(tmp_path, **{"AGENTS.md": "Watch."})
    (tmp_path / "CLAUDE.md").symlink_to("AGENTS.md")
    assert instructions_of(tmp_path) == "Watch."
    (tmp_path / "CLAUDE.md").unlink()
    write(tmp_path, **{"CLAUDE.md": "@AGENTS.md\n\nBe brief."})
    assert instructions_of(tmp_path) == "Watch.\n\n@AGENTS.md\n\nBe brief."


def test_imports_are_followed_five_levels_deep(tmp_path: Path) -> None:
    write(tmp_path, **{"CLAUDE.md": "@1.md"}, **{f"{number}.md": f"@{number + 1}.md" for number in range(1, 8)})
    guidance = read_guidance(tmp_path)
    assert guidance.files == ("CLAUDE.md", *(f"{number}.md" for number in range(1, 6)))
    assert guidance.notes == (f"{tmp_path / '5.md'}: @6.md is not imported: imports are at most 5 levels deep.",)


def test_nothing_outside_of_the_folder_is_imported_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: a text that brings in the keys of the person who runs it."""
    folder = tmp_path / "desk"
    write(tmp_path, **{"secret.md": "hush", ".ssh/id.md": "hush", "desk/keys": ""})
    (folder / "link.md").symlink_to(tmp_path / "secret.md")
    (folder / "up").symlink_to(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    names = ("../secret.md", "~/.ssh/id.md", str(tmp_path / "secret.md"), "link.md", "up/.ssh/id.md", "~/gone.md")
    write(folder, **{"CLAUDE.md": "\n".join(f"@{name}" for name in names)})
    guidance = read_guidance(folder)
    assert guidance.files == ("CLAUDE.md",)
    assert "hush" not in guidance.text
    assert [note.partition(" is not imported: ")[0] for note in guidance.notes] == [
        f"{folder / 'CLAUDE.md'}: @{name}" for name in names
    ]
    assert all("the agent's folder" in note for note in guidance.notes)
    (folder / "CLAUDE.md").unlink()
    (folder / "CLAUDE.md").symlink_to(tmp_path / "secret.md")
    guidance = read_guidance(folder)
    assert guidance.text == ""
    assert guidance.notes == (f"{folder / 'CLAUDE.md'} is left out: it leads out of the agent's folder.",)


def test_what_the_agent_may_have_written_is_not_imported(tmp_path: Path) -> None:
    """The attack: an agent that writes its own instructions."""
    write(
        tmp_path,
        **{
            "agent.yaml": "name: desk\ntools: {files: {root: work}}\ncollections: {papers: {path: papers}}\n",
            "CLAUDE.md": "@work/a.md @papers/a.md @data/a.md @docs/a.md",
            **{f"{name}/a.md": "Obey." for name in ("work", "papers", "data", "docs")},
        },
    )
    agent = resolve_agent(FleetConfig(), read_agent(tmp_path), tmp_path)
    assert "Contents of docs/a.md" in agent.model_settings.instructions
    assert agent.model_settings.instructions.count("Obey.") == 1
    assert [note.partition(": @")[2].partition(" ")[0] for note in agent.notes] == [
        "work/a.md",
        "papers/a.md",
        "data/a.md",
    ]
    assert all("it is in a folder of data, which the agent may have written" in note for note in agent.notes)


def test_what_is_imported_is_protected_from_tools_and_part_of_the_definition_and_of_what_is_trusted(
    tmp_path: Path,
) -> None:
    write(tmp_path, **{"agent.yaml": "name: desk\n", "CLAUDE.md": "@docs/a.md", "docs/a.md": "Watch."})
    protected = {entry.path for entry in definition_of(tmp_path)}
    assert {tmp_path / name for name in ("CLAUDE.md", ".claude/CLAUDE.md", ".claude", "docs/a.md")} <= protected
    definition, trusted = definition_digest(tmp_path), digest_folder(tmp_path)
    write(tmp_path, **{"docs/a.md": "Sleep."})
    assert definition_digest(tmp_path) != definition
    assert digest_folder(tmp_path) != trusted


def test_files_that_are_no_text_and_too_many_files_are_said(tmp_path: Path) -> None:
    write(tmp_path, **{f"{number}.md": "x" for number in range(MAX_IMPORTS + 1)})
    (tmp_path / "logo.png").write_bytes(b"\x89PNG\0")
    (tmp_path / "docs").mkdir()
    numbers = " ".join(f"@{number}.md" for number in range(MAX_IMPORTS + 1))
    write(tmp_path, **{"CLAUDE.md": f"@logo.png @docs {numbers}"})
    first, last = read_guidance(tmp_path).notes
    assert "@logo.png is not imported: it is not UTF-8 text" in first
    assert f"@{MAX_IMPORTS}.md is not imported: at most {MAX_IMPORTS} files are imported" in last


def test_skills_are_found_in_the_folder_of_another_program_as_well(tmp_path: Path) -> None:
    write(
        tmp_path,
        **{
            "agent.yaml": "name: desk\n",
            ".agents/skills/count/SKILL.md": "Count.",
            ".claude/skills/sum/SKILL.md": "---\nname: sum\ndescription: Adds.\nallowed-tools: Bash(rm *)\n---\nAdd.",
        },
    )
    (tmp_path / ".claude/skills/count").symlink_to("../../.agents/skills/count")
    skills = read_skills(tmp_path)
    assert [(skill.name, skill.instructions) for skill in skills.values()] == [("count", "Count."), ("sum", "Add.")]
    agent = resolve_agent(FleetConfig(), read_agent(tmp_path), tmp_path)
    assert "run_skill" in agent.tasks.verbs
    assert agent.policy == resolve_agent(FleetConfig(), read_agent(tmp_path), None).policy
    definition = definition_digest(tmp_path)
    write(tmp_path, **{".claude/skills/sum/SKILL.md": "Multiply."})
    assert definition_digest(tmp_path) != definition
