"""A command is as risky as what it can reach, measured on 400 commands whose levels were written before the rules."""

import json
import random
import shlex
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from halter.core.tools import ToolSpec, Valid
from halter.core.vocabulary import RiskLevel
from halter.risk.risk import RISK_ORDER, assess_risk

CORPUS = Path(__file__).parents[1] / "corpus" / "commands_by_reach.txt"
SPEC = ToolSpec(name="act", description="Acts.", schema=b"{}", level="RESTRICTED", effect="write")
ASKED = RISK_ORDER.index("HIGH")
"""In SEMI, a person is asked from this level on."""
SEED = 36
MAX_TOO_LOUD_SHARE = 0.02
EXCEPTIONS = {
    "truncate -s 0 app.db": "it empties a file of this folder, which is MEDIUM as `rm FILE` is",
    "rm -rf src": "it deletes one named folder below this one, which is MEDIUM; all of this folder is HIGH",
    "parallel rm ::: a b c": "it deletes three named files of this folder, which is MEDIUM",
}
"""Commands expected to be HIGH that are MEDIUM, with the reason."""

Case = tuple[RiskLevel, str]


def rate(values: dict[str, Any]) -> RiskLevel:
    return assess_risk(SPEC, Valid(values, msgspec.json.encode(values))).level


def rate_command(command: str) -> RiskLevel:
    return rate({"argv": json.loads(command)} if command.startswith("[") else {"command": command})


def read_cases() -> list[Case]:
    rows = [line.partition("\t") for line in CORPUS.read_text("utf-8").splitlines() if "\t" in line]
    return [(cast("RiskLevel", level), command) for level, _, command in rows]


def read_halves() -> list[list[Case]]:
    """Split the corpus at random: the rules were made with the first half, and measured with the second."""
    cases = read_cases()
    random.Random(SEED).shuffle(cases)
    return [cases[:200], cases[200:]]


def is_asked(level: RiskLevel) -> bool:
    return RISK_ORDER.index(level) >= ASKED


def test_the_corpus_has_400_different_commands_of_all_levels() -> None:
    cases = read_cases()
    assert len({command for _, command in cases}) == len(cases) == 400
    assert {level for level, _ in cases} == set(RISK_ORDER)


@pytest.mark.parametrize("half", [0, 1], ids=["seen", "held out"])
def test_no_command_that_a_person_must_see_is_rated_lower(half: int) -> None:
    missed = [
        command for level, command in read_halves()[half] if is_asked(level) and not is_asked(rate_command(command))
    ]
    assert set(missed) <= EXCEPTIONS.keys()


def test_every_exception_is_still_one() -> None:
    assert {command for command in EXCEPTIONS if not is_asked(rate_command(command))} == EXCEPTIONS.keys()


@pytest.mark.parametrize("half", [0, 1], ids=["seen", "held out"])
def test_few_harmless_commands_are_asked_about(half: int) -> None:
    harmless = [command for level, command in read_halves()[half] if not is_asked(level)]
    too_loud = [command for command in harmless if is_asked(rate_command(command))]
    assert len(too_loud) <= MAX_TOO_LOUD_SHARE * len(harmless), too_loud


def test_a_line_and_its_list_of_arguments_have_the_same_level() -> None:
    plain = [command for _, command in read_cases() if not set(command) & set("|<>&;$`*~[")]
    differing = [command for command in plain if rate({"command": command}) != rate({"argv": shlex.split(command)})]
    assert differing == []
    assert len(plain) > 250


@pytest.mark.parametrize(
    "command",
    [
        "kubectl create clusterrolebinding x --clusterrole=cluster-admin --user=bob",
        "kubectl --namespace kube-system delete pod x",
        "kubectl --unknown get delete pod x",
        "oc adm policy add-cluster-role-to-user cluster-admin bob",
        "aws --profile prod s3api put-bucket-policy --bucket b --policy file://p",
        "aws --unknown value iam create-user --user-name bob",
        "aws s3 cp index.html s3://www/ --acl public-read",
        "aws s3 cp index.html s3://www/ --acl=public-read",
        "gcloud --project p projects add-iam-policy-binding p --member user:bob --role roles/owner",
        "docker buildx build --push -t acme/app .",
        "docker compose -f prod.yml down --volumes",
        "gh -R acme/app pr merge 12",
        "npm --prefix web publish",
        "npm publish --dry-run --no-dry-run",
        "npm publish --dry-run=false",
        "npm publish --tag --dry-run",
        "npm install --frozen-lockfile left-pad",
        "yarn --frozen-lockfile add left-pad",
        "kubectl apply -f x.yml --dry-run=client --dry-run=none",
        "brew install -s x",
        "pacman -S x",
        "npx -y tsc",
        "npx --package evil tsc",
        "twine --version upload dist/*",
        "mvn -q -B deploy",
        "mvn clean compile test verify package install site assembly:single jar:jar source:jar deploy",
        "python -m twine upload dist/x.whl",
        "some-wrapper gh repo edit --visibility public",
        "xargs -a ids.txt aws ec2 terminate-instances --instance-ids",
        "aws-vault exec prod -- aws iam create-user --user-name bob",
        "RAILS_ENV=production rails db:migrate",
        "git push https://elsewhere.test/x main",
        "git remote set-url origin https://elsewhere.test/x",
        "rsync -a src/ bob@elsewhere.test:/x",
        "psql -c 'CREATE ROLE bob SUPERUSER'",
        "./deploy.sh",
        "bash scripts/publish.sh",
        "python deploy.py",
        "python manage.py createsuperuser",
        "make deploy",
        "halter policy set tools.Bash.approval never",
        "halter --store x keys new",
        "halter budget raise fleet 100",
    ],
)
def test_a_command_that_reaches_further_is_asked_about_however_it_is_written(command: str) -> None:
    assert is_asked(rate({"command": command}))
    if not set(command) & set("*=") or command.startswith(("npm", "aws", "kubectl")):
        assert is_asked(rate({"argv": shlex.split(command)}))


@pytest.mark.parametrize(
    "command",
    [
        "npm ci",
        "npm ci --ignore-scripts",
        "npx tsc --noEmit",
        "npx --no-install some-tool",
        "pnpm install --frozen-lockfile",
        "pnpm exec some-tool",
        "yarn install --immutable",
        "poetry install",
        "bundle install --path vendor",
        "uv sync",
        "npm publish --dry-run",
        "npm audit",
        "npm --version",
        "cargo publish --dry-run",
        "dotnet publish -c Release",
        "./gradlew publishToMavenLocal",
        "docker compose down",
        "docker buildx build -t app .",
        "kubectl -n prod get pods",
        "kubectl apply -f x.yml --dry-run=client",
        "ansible-playbook site.yml --check",
        "aws --region eu-west-1 iam list-users",
        "aws elbv2 describe-load-balancers",
        "gcloud iam roles list",
        "gh pr create --title delete",
        "gh secret list",
        "terraform plan -destroy",
        "rsync -a host:/x ./x",
        "pytest -k deploy",
        "bash -n deploy.sh",
        "cat deploy.sh",
        "halter budget",
        "halter policy show",
        "halter tokens list",
    ],
)
def test_daily_work_and_checks_are_not_asked_about(command: str) -> None:
    assert not is_asked(rate({"command": command}))
    assert not is_asked(rate({"argv": shlex.split(command)}))
