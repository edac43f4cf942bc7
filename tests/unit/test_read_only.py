"""A command line counts as reading only if it certainly changes nothing."""

import pytest

from halter.risk.read_only import only_reads

READING = """\
ls -la
cat a.txt | grep -i error | sort | uniq -c | head -5
git status
git log --oneline -5
git branch
git remote -v
git config --get user.name
grep -rn foo src 2>/dev/null
ls nowhere > /dev/null 2>&1
find . -name '*.py' -type f
sed -n '1,40p' a.py
sed 's/a/b/g' a.txt
awk '{print $1}' a.txt
for f in *.py; do wc -l "$f"; done
if [ -f a ]; then cat a; fi
cd src && ls
echo "$(git rev-parse HEAD)"
npm ls --depth=0
npm config get registry
pip list
python3 --version
kubectl get pods -n prod
docker ps -a
find . -name '*.py' | xargs grep -l foo
timeout 5 cat a.txt
date +%F
du -sh * | sort -h
/usr/bin/head -1 a.txt
LC_ALL=C sort a.txt
TZ=UTC date
NO_COLOR=1 git diff
name=a.txt; cat "$name"
read line < a.txt; echo "$line"
git log --oneline --stat
printf '%s' PATH
"""
CHANGING = """\
> prod.db
: > prod.db
echo x > a.txt
echo x >> a.txt
cat a &> log.txt
cat a 2> log.txt
cat a >| b
cat <<< x > b
sed -i 's/a/b/' a.txt
sed --in-place 's/a/b/' a.txt
sed -n 'w out' a.txt
sed 's/a/b/w out' a.txt
sed '1e touch x' a.txt
sed -f script a.txt
touch a
mkdir a
cp a b
mv a b
ln -s a b
chmod 644 a
git commit -m x
git add .
git -c core.pager=x log
git checkout main
git branch topic
git branch -D topic
git tag v1
git stash
git config user.name x
git remote add origin x
git diff --output=x
git fetch
npm config set registry http://evil.example
npm install
npm version patch
pip install x
tee a
ls | tee a
sort -o a a
sort --output=a a
uniq a b
xxd -r a b
date -s 2020-01-01
hostname new
find . -delete
find . -exec touch {} ;
find . -fprint a
awk '{print > "a"}' b
awk 'BEGIN{system("touch x")}'
awk -f prog a
xargs touch
env touch a
time -o a ls
bash script.sh
bash -c 'touch a'
echo 'touch a' | bash
eval 'touch a'
echo "$(touch a)"
ls; touch a
f() { touch a; }; f
./ls
make
python3 -c 'print(1)'
$PROGRAM a
crontab -r
kubectl apply -f a
docker run x
mktemp
tar xf a.tar
curl -o a https://example.com
history -c
unknown --flag
GIT_PAGER='touch a' git log
env GIT_PAGER='touch a' git log
MANPAGER=x man ls
RIPGREP_CONFIG_PATH=x rg y
KUBECONFIG=./x kubectl get pods
export PATH=.; ls
read PATH; ls
printf -v PATH .; ls
mapfile -t PATH < a; ls
hash -p ./x ls; ls
kubectl get pods --kubeconfig=./x
kubectl get pods --kubeconfig ./x
cargo tree --config x
go list -toolexec=./x ./...
nm --plugin=./x.so a
pip list --log x
sort --compress-program=./x a
sort --outpu=b a
base64 -o b a
gawk -o/tmp/x '{print}'
gawk -p '{print}' a
gawk -E x a
file -C -m a
ss -K dst 10.0.0.1
ss -D out
man -P 'touch a' ls
less '+!touch a' a
git grep -O'touch a' foo
git ls-remote --upload-pack='touch a' .
date 010100002020
date --se=2020-01-01
"""


@pytest.mark.parametrize("line", READING.splitlines())
def test_a_line_that_changes_nothing_is_recognized(line: str) -> None:
    assert only_reads(line)


@pytest.mark.parametrize("line", ["", *CHANGING.splitlines()])
def test_a_line_that_may_change_something_does_not_count_as_reading(line: str) -> None:
    assert not only_reads(line)


def test_a_list_of_words_is_judged_as_the_command_that_it_is() -> None:
    assert only_reads(["bash", "-lc", "ls | wc -l"])
    assert only_reads(["cat", "a > b"])
    assert not only_reads(["bash", "-lc", "ls > a"])
    assert not only_reads(["touch", "a"])
