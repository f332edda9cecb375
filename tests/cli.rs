//! The program `kvstate` as a process: what it prints, what it writes, and how it ends.
#![cfg(feature = "cli")]
#![allow(missing_docs, reason = "a test")]

mod slots;

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use kvstate::format::Checkpoint;
use kvstate::session::SlotContents;
use serde_json::Value;
use slots::support::{NONE, context, decode, kv, save};
use slots::{DRIVER, TOKENS, checkpoint_states, checkpoints, draft, save_slot, target};
use tempfile::TempDir;

/// A folder with a slot file in it.
struct Files(TempDir);

impl Files {
    fn new() -> Self {
        let files = Self(tempfile::tempdir().unwrap());
        save_slot(&files.path("slot.bin"));
        files
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        fs::write(self.path(name), bytes).unwrap();
        self.path(name)
    }

    /// The slot file with a byte of a part flipped.
    fn damaged(&self, name: &str, at: usize) -> PathBuf {
        let mut bytes = fs::read(self.path("slot.bin")).unwrap();
        bytes[at] ^= 1;
        self.write(name, &bytes)
    }

    /// Runs the program in the folder.
    fn run(&self, arguments: &[&str]) -> Output {
        program().current_dir(self.0.path()).args(arguments).output().unwrap()
    }

    /// What it prints when all is well.
    fn prints(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", text(&output.stderr));
        assert_eq!(text(&output.stderr), "", "{arguments:?}");
        text(&output.stdout)
    }

    fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.prints(arguments)).unwrap()
    }
}

fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_kvstate"))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn fixture(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name).to_str().unwrap().to_owned()
}

// inspect

#[test]
fn inspect_shows_a_slot_file_as_text() {
    let printed = Files::new().prints(&["inspect", "slot.bin"]);
    let expected = [
        "slot.bin: sequence file of version 4, 2,792 bytes\n",
        "tokens             5, a payload of the server, 20 bytes at 12\n",
        "read by the geometry in the file\n",
        "section 1          attention, 2 layers, V in rows, n_rot_k 0, n_rot_v 0, no ext;",
        "  stream 0         12 cells, positions 0 to 11\n",
        "    seq 0          ############\n",
        "    K              layers 0 to 1: f16 x 4, 12 rows of 8 bytes, from ",
        "  checkpoint 1     8 tokens, positions 0 to 7; target ",
        "draft state        ",
        "  section 0        attention, 2 layers",
        "      seq 1        ############\n",
        "model              'gemma 3'\n",
        "metadata           'slot 0'\n",
        "salt               6 bytes of crc32c ",
        "checksums          all parts are whole\n",
        "  memory state       1,008 bytes at 32: whole\n",
    ];
    for line in expected {
        assert!(printed.contains(line), "{line}\nin\n{printed}");
    }
    assert!(!printed.contains("tenant"), "the salt is not shown:\n{printed}");
}

#[test]
fn inspect_gives_programs_every_run_of_cells_and_the_place_of_every_tensor() {
    let found = Files::new().json(&["inspect", "slot.bin", "--json"]);
    assert_eq!(found["kind"], "sequence_file");
    assert_eq!(found["version"], 4);
    assert_eq!(found["token_list"], serde_json::json!(TOKENS));
    assert_eq!(found["state"]["basis"], "recorded");
    let section = &found["state"]["sections"][1];
    assert_eq!(section["shape"]["kind"], "attention");
    assert_eq!(section["shape"]["data"]["n_layer"], 2);
    let tensor = &section["streams"][0]["tensors"][3];
    assert_eq!((&tensor["tag"], &tensor["layer"]), (&Value::from("V"), &Value::from(1)));
    assert_eq!((&tensor["ggml_type"], &tensor["row_size"]), (&Value::from("f16"), &Value::from(4)));
    assert_eq!(tensor["offset"].as_u64().unwrap() + 12 * 4, section["bytes"]["end"].as_u64().unwrap());
    let cells = &found["cells"][1][0];
    assert_eq!((&cells["pos_max"], &cells["n_missing"]), (&Value::from(11), &Value::from(0)));
    assert_eq!(
        cells["runs"],
        serde_json::json!([{"pos": {"start": 0, "end": 11}, "cell": 0, "seq_ids": [0]}])
    );
    assert_eq!(found["appendices"]["checkpoints"][2]["span"]["n_tokens"], 12);
    assert_eq!(found["appendices"]["integrity"]["identity"]["model"], "67656d6d612033");
    assert_eq!(found["draft_state"]["state"]["sections"].as_array().unwrap().len(), 1);
    assert_eq!(found["verification"]["has_checksums"], true);
}

#[test]
fn inspect_shows_gaps_and_sequences() {
    let files = Files::new();
    let printed = files.prints(&["inspect", &fixture("tiny2x64_kf16_vf16_hole_none.bin")]);
    assert!(printed.contains("54 cells, positions 0 to 63, 10 missing between\n"), "{printed}");
    assert!(
        printed.contains(&format!("{}{}{}\n", "#".repeat(20), ".".repeat(10), "#".repeat(34))),
        "{printed}"
    );
    assert!(printed.contains("    cell 20        positions 30 to 63, sequence 0\n"), "{printed}");

    let whole = fixture("tiny2x64_kf16_vf16_vtrans_ns4u_whole.ctx");
    let few = files.prints(&["inspect", &whole]);
    assert!(few.contains("more runs: --cells shows them") && few.contains("seq 2 "), "{few}");
    let all = files.prints(&["inspect", "--cells", &whole]);
    assert!(!all.contains("more runs") && all.lines().count() > few.lines().count() + 30, "{all}");
}

#[test]
fn inspect_says_what_is_damaged_and_ends_with_3() {
    let files = Files::new();
    let path = files.damaged("bad.bin", 1039);
    let output = files.run(&["inspect", "bad.bin"]);
    assert_eq!(output.status.code(), Some(3));
    let printed = text(&output.stdout);
    assert!(printed.contains("checksums          damaged\n"), "{printed}");
    assert!(printed.contains("  memory state       1,008 bytes at 32: damaged: crc32c "), "{printed}");
    // What was not asked for is not compared.
    let printed = files.prints(&["inspect", "bad.bin", "--verify", "headers"]);
    assert!(printed.contains("nothing is damaged, as far as was compared"), "{printed}");

    let bytes = fs::read(path).unwrap();
    files.write("short.bin", &bytes[..900]);
    let output = files.run(&["inspect", "short.bin"]);
    assert_eq!(output.status.code(), Some(3));
    let printed = text(&output.stdout);
    assert!(printed.contains("understood so far; then: truncated state: rows needs"), "{printed}");
}

#[test]
fn what_is_no_state_is_an_error_that_names_the_file() {
    let files = Files::new();
    files.write("model.gguf", b"GGUF\x03\0\0\0");
    for (file, reason) in [
        ("model.gguf", "model.gguf: unknown (magic, version) for sequence state file: 46554747, 00000003"),
        ("absent.bin", "open absent.bin: "),
        (".", "read .: "),
        ("/dev/null", "read /dev/null: not a regular file"),
    ] {
        for command in ["inspect", "verify"] {
            let output = files.run(&[command, file]);
            assert_eq!(output.status.code(), Some(1), "{command} {file}");
            let printed = text(&output.stderr);
            assert!(printed.starts_with(&format!("kvstate: {reason}")), "{command} {file}: {printed}");
            assert_eq!(text(&output.stdout), "", "{command} {file}");
        }
    }
    files.write("empty.bin", b"");
    assert_eq!(files.run(&["inspect", "empty.bin"]).status.code(), Some(1));
}

#[test]
fn wrong_usage_ends_with_2() {
    let files = Files::new();
    for arguments in [
        &["inspect"][..],
        &["show", "slot.bin"],
        &["verify"],
        &["verify", "slot.bin", "--level", "most"],
        &["diff", "slot.bin"],
        &["extract", "slot.bin"],
        &["extract", "slot.bin", "--draft"],
        &["extract", "slot.bin", "--tokens", "--draft", "-o", "x"],
        &["extract", "slot.bin", "--checkpoint", "first", "-o", "x"],
        &["convert", "slot.bin"],
        &["convert", "slot.bin", "x", "--v-trans", "2"],
        &["convert", "slot.bin", "x", "--type-k", "q9"],
        &["convert", "slot.bin", "x", "--type-v", "q8"],
    ] {
        assert_eq!(files.run(arguments).status.code(), Some(2), "{arguments:?}");
    }
    assert!(files.prints(&["--help"]).contains("3 something is damaged, or differs"));
}

// The picture

/// A parser that knows as much of XML as the picture needs: every element is closed in order, every attribute quoted.
fn elements(svg: &str) -> Vec<String> {
    let (mut open, mut all) = (Vec::new(), Vec::new());
    let mut rest = svg;
    while let Some(start) = rest.find('<') {
        let end = start + rest[start..].find('>').expect("an end");
        let tag = &rest[start + 1..end];
        assert!(!rest[..start].contains('>') && !tag.contains('<'), "{tag}");
        rest = &rest[end + 1..];
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop().as_deref(), Some(name));
            continue;
        }
        let name = tag.trim_end_matches('/').split(' ').next().unwrap().to_owned();
        assert!(tag.matches('"').count().is_multiple_of(2), "{tag}");
        if !tag.ends_with('/') {
            open.push(name);
        }
        all.push(tag.to_owned());
    }
    assert_eq!(open, [""; 0]);
    all
}

#[test]
fn the_picture_has_a_lane_for_each_section_and_sequence_and_shows_gaps() {
    let files = Files::new();
    files.prints(&["inspect", "slot.bin", "--svg", "slot.svg"]);
    let svg = fs::read_to_string(files.path("slot.svg")).unwrap();
    let lanes = elements(&svg).iter().filter(|tag| tag.starts_with("rect class=\"l\"")).count();
    assert_eq!(lanes, 2);
    assert_eq!(svg.matches("12 cells, 0 to 11").count(), 2);
    assert_eq!(svg.matches(" tokens</title></path>").count(), 3, "checkpoints");

    files.prints(&["inspect", &fixture("tiny2x64_kf16_vf16_hole_none.bin"), "--svg", "hole.svg"]);
    let svg = fs::read_to_string(files.path("hole.svg")).unwrap();
    elements(&svg);
    assert!(svg.contains("<title>0 to 19</title>") && svg.contains("<title>30 to 63</title>"), "{svg}");

    files.prints(&["inspect", &fixture("tiny2x64_kf16_vf16_vtrans_ns4u_whole.ctx"), "--svg", "whole.svg"]);
    let svg = fs::read_to_string(files.path("whole.svg")).unwrap();
    let mut colours: Vec<_> =
        elements(&svg).iter().filter_map(|tag| Some(tag.split_once("fill=\"#")?.1[..6].to_owned())).collect();
    colours.sort_unstable();
    colours.dedup();
    assert_eq!(colours.len(), 3, "one for each sequence");
}

#[test]
fn the_picture_says_which_cells_are_shared() {
    let files = Files::new();
    let mut ctx = context(2, &[kv(16)]);
    decode(&mut ctx, 0, 0..8);
    ctx.seq_cp(0, 1, 0, 4).unwrap();
    let mut state = vec![0; usize::try_from(ctx.state_get_size().unwrap()).unwrap()];
    ctx.state_get_data(&mut state).unwrap();
    files.write("whole.bin", &state);
    files.prints(&["inspect", "whole.bin", "--svg", "out.svg"]);
    let svg = fs::read_to_string(files.path("out.svg")).unwrap();
    assert_eq!(svg.matches("fill-opacity=\".5\"").count(), 2, "{svg}");
    assert!(svg.contains("pale: cells that several sequences have"), "{svg}");
}

#[test]
fn the_picture_stays_small_and_says_what_it_draws_as_one() {
    let files = Files::new();
    let mut ctx = context(1, &[kv(4096)]);
    // Every other position.
    for start in (0..4096).step_by(512) {
        decode(&mut ctx, 0, (start..start + 512).step_by(2));
    }
    files.write("holes.bin", &save(&mut ctx, 0, NONE));
    files.prints(&["inspect", "holes.bin", "--svg", "holes.svg"]);
    let svg = fs::read_to_string(files.path("holes.svg")).unwrap();
    assert!(elements(&svg).len() < 600);
    assert!(svg.contains("positions between them are drawn as one</text>"), "{svg}");
}

#[test]
fn a_name_in_the_picture_cannot_leave_its_text() {
    let files = Files::new();
    let name = "a<b>&\"c.bin";
    fs::copy(files.path("slot.bin"), files.path(name)).unwrap();
    files.prints(&["inspect", name, "--svg", "out.svg"]);
    let svg = fs::read_to_string(files.path("out.svg")).unwrap();
    elements(&svg);
    assert!(svg.contains(">a&lt;b&gt;&amp;&quot;c.bin</text>"), "{svg}");
}

// verify

#[test]
fn verify_says_which_part_of_which_file_is_damaged() {
    let files = Files::new();
    assert_eq!(files.prints(&["verify", "slot.bin"]), "slot.bin: whole\n");
    for (name, at, part) in [
        ("head.bin", 13, "header and tokens"),
        ("state.bin", 500, "memory state"),
        ("checkpoints.bin", 1400, "checkpoints"),
        ("draft.bin", 2300, "draft state"),
    ] {
        files.damaged(name, at);
        let output = files.run(&["verify", "slot.bin", name]);
        assert_eq!(output.status.code(), Some(3), "{name}");
        let printed = text(&output.stdout);
        let lines: Vec<_> = printed.lines().collect();
        assert_eq!(lines[..2], ["slot.bin: whole", &*format!("{name}: damaged")], "{printed}");
        assert!(lines.len() == 3 && lines[2].starts_with(&format!("  {part} ")), "{printed}");

        let output = files.run(&["verify", "--json", "slot.bin", name]);
        assert_eq!(output.status.code(), Some(3), "{name}");
        let found: Value = serde_json::from_slice(&output.stdout).unwrap();
        let parts = found[1]["verification"]["parts"].as_array().unwrap();
        let damaged: Vec<_> = parts.iter().filter(|part| part["outcome"].get("damaged").is_some()).collect();
        assert_eq!(damaged.len(), 1, "{name}");
        assert_eq!(damaged[0]["part"], part, "{name}");
    }
}

#[test]
fn verify_of_a_file_without_checksums_says_so() {
    let file = fixture("tiny2x64_kf16_vf16_n64_none.slot");
    let printed = Files::new().prints(&["verify", &file]);
    assert_eq!(printed, format!("{file}: no checksums; the structure makes sense\n"));
}

#[test]
fn a_file_that_cannot_be_verified_does_not_hide_the_others() {
    let files = Files::new();
    files.damaged("bad.bin", 500);
    let output = files.run(&["verify", "absent.bin", "bad.bin", "slot.bin"]);
    assert_eq!(output.status.code(), Some(3));
    assert!(text(&output.stderr).starts_with("kvstate: open absent.bin: "));
    let printed = text(&output.stdout);
    assert!(printed.starts_with("bad.bin: damaged\n") && printed.ends_with("slot.bin: whole\n"), "{printed}");
    assert_eq!(files.run(&["verify", "absent.bin", "slot.bin"]).status.code(), Some(1));
}

// diff

#[test]
fn diff_ends_with_0_for_the_same_and_with_3_for_what_differs() {
    let files = Files::new();
    assert_eq!(files.prints(&["diff", "slot.bin", "slot.bin"]), "no difference\n");

    let mut ctx = target();
    let a = save(&mut ctx, 0, NONE);
    let mut b = a.clone();
    let last = b.len() - 2;
    b[last..].copy_from_slice(&[0, 0x3c]); // 1 in f16: the last V of the last layer
    files.write("a.bin", &a);
    files.write("b.bin", &b);
    let output = files.run(&["diff", "a.bin", "b.bin"]);
    assert_eq!(output.status.code(), Some(3));
    let printed = text(&output.stdout);
    let expected =
        "section 1, stream 0: V of layer 1: 1 of 24 values differ, the first at position 11, element 1: ";
    assert!(printed.starts_with(expected) && printed.ends_with(" | 1\n"), "{printed}");

    let output = files.run(&["diff", "a.bin", "b.bin", "--json"]);
    assert_eq!(output.status.code(), Some(3));
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    let tensor = &found["sections"][0]["tensors"][0];
    assert_eq!((&tensor["n_differ"], &tensor["pos"], &tensor["b"]), (&1.into(), &11.into(), &"1".into()));
}

#[test]
fn diff_of_other_shapes_names_the_fields() {
    let [a, b] = ["tiny2x64_kf16_vf16_n64_none.bin", "tiny2x64_kq4_0_vq8_0_n64_none.bin"].map(fixture);
    let output = Files::new().run(&["diff", &a, &b]);
    assert_eq!(output.status.code(), Some(3));
    let printed = text(&output.stdout);
    assert!(printed.starts_with("section 0, K of layer 0: shape: K x 64 f16 | K x 64 q4_0\n"), "{printed}");
}

#[test]
fn diff_with_a_state_that_is_not_understood_is_an_error() {
    let files = Files::new();
    let blob = save(&mut target(), 0, NONE);
    files.write("short.bin", &blob[..blob.len() - 1]);
    let output = files.run(&["diff", "slot.bin", "short.bin"]);
    assert_eq!(output.status.code(), Some(1));
    let printed = text(&output.stderr);
    assert!(
        printed.starts_with("kvstate: short.bin: the memory state is not understood: truncated"),
        "{printed}"
    );
}

/// A slot file whose checkpoints and draft are states.
fn save_states(path: &Path) {
    let (mut target, mut draft) = (target(), draft());
    let (states, of_draft) = (checkpoint_states(&mut target), save(&mut draft, 1, NONE));
    let checkpoints =
        checkpoints(&states).into_iter().map(|taken| Checkpoint { draft: &of_draft[..], ..taken });
    let contents = SlotContents {
        tokens: &TOKENS,
        checkpoints: checkpoints.collect(),
        draft: Some((&mut draft, 1)),
        ..SlotContents::default()
    };
    target.slot_save(path, 0, contents).unwrap();
}

#[test]
fn diff_compares_the_states_of_checkpoints_and_draft_by_their_values() {
    let files = Files::new();
    save_states(&files.path("slot.bin"));
    files.prints(&["convert", "slot.bin", "turned.bin", "--v-trans", "1"]);
    let printed = files.prints(&["diff", "slot.bin", "turned.bin"]);
    let lines: Vec<_> = printed.lines().collect();
    assert_eq!(lines[0], "no difference");
    for line in [
        "layout alone: section 0: v_trans: false | true",
        "layout alone: checkpoint 2, target, section 0: v_trans: false | true",
        "layout alone: draft state, section 0: v_trans: false | true",
    ] {
        assert!(lines.contains(&line), "{line}: {printed}");
    }

    // The last V of the second checkpoint, and of the draft.
    let bytes = fs::read(files.path("slot.bin")).unwrap();
    let found = files.json(&["inspect", "slot.bin", "--json"]);
    let end = |blob: &Value| usize::try_from(blob["end"].as_u64().unwrap()).unwrap();
    let of = &found["appendices"];
    for (end, place) in [
        (
            end(&of["checkpoints"][1]["target"]),
            "checkpoint 1, target, section 0, stream 0: V of layer 1: 1 of ",
        ),
        (end(&of["draft"]["draft"]), "draft state, section 0, stream 0: V of layer 1: 1 of "),
    ] {
        let mut changed = bytes.clone();
        changed[end - 2] ^= 1;
        files.write("changed.bin", &changed);
        let output = files.run(&["diff", "slot.bin", "changed.bin"]);
        assert_eq!(output.status.code(), Some(3));
        let printed = text(&output.stdout);
        assert!(printed.starts_with(place) && printed.lines().count() == 1, "{printed}");
    }
}

#[test]
fn diff_compares_a_checkpoint_that_is_not_understood_by_its_bytes() {
    let files = Files::new();
    let bytes = fs::read(files.path("slot.bin")).unwrap();
    let found = files.json(&["inspect", "slot.bin", "--json"]);
    let draft = found["appendices"]["checkpoints"][0]["draft"]["start"].as_u64().unwrap();
    let mut changed = bytes;
    changed[usize::try_from(draft).unwrap() + 3] = b'p';
    files.write("changed.bin", &changed);
    let output = files.run(&["diff", "slot.bin", "changed.bin"]);
    assert_eq!(text(&output.stdout), "checkpoint 0, draft: bytes: 5 bytes, 66 at 3 | 5 bytes, 70 at 3\n");
}

// convert

#[test]
fn convert_turns_v_and_turns_it_back() {
    let files = Files::new();
    let slot = fixture("tiny2x64_kf16_vf16_n64_none.slot");
    let bytes = fs::read(&slot).unwrap();
    assert_eq!(
        files.prints(&["convert", &slot, "turned.slot", "--v-trans", "1"]),
        format!(
            "turned.slot: {} bytes\n  the file has no identity and no checksums: nothing was compared\n  section kv, V of 2 layers: rows -> transposed\n",
            bytes.len()
        )
    );
    let turned = files.json(&["inspect", "turned.slot", "--json"]);
    assert_eq!(turned["state"]["sections"][0]["shape"]["data"]["v_trans"], true);
    // In its place.
    files.prints(&["convert", "turned.slot", "turned.slot", "--v-trans", "0"]);
    assert!(fs::read(files.path("turned.slot")).unwrap() == bytes, "not the file of llama.cpp");
}

#[test]
fn convert_writes_old_files_in_the_newest_version() {
    let files = Files::new();
    for (old, n) in [("v2", 2), ("v3", 3)] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(old);
        let slots = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let slot = slots.filter(|path| path.extension().is_some_and(|of| of == "slot")).min().unwrap();
        files.prints(&["convert", slot.to_str().unwrap(), "new.slot", "--legacy-rotation", "plain"]);
        assert_eq!(fs::read(slot).unwrap()[4], n);
        assert_eq!(fs::read(files.path("new.slot")).unwrap()[4], 4);
    }
}

#[test]
fn convert_to_another_type_says_so() {
    let files = Files::new();
    let slot = fixture("tiny2x64_kf16_vf16_n64_none.slot");
    let printed = files.prints(&["convert", &slot, "q8.slot", "--type-k", "q8_0", "--type-v", "bf16"]);
    assert!(printed.contains("  section kv, K of 2 layers: f16 -> q8_0\n"), "{printed}");
    assert!(printed.contains("  section kv, V of 2 layers: f16 -> bf16\n"), "{printed}");
    let inspected = files.prints(&["inspect", "q8.slot"]);
    assert!(inspected.contains("layers 0 to 1: q8_0 x 64, 64 rows of 68 bytes"), "{inspected}");
    let output = files.run(&["diff", &slot, "q8.slot"]);
    assert!(text(&output.stdout).contains("shape: V x 64 f16 | V x 64 bf16"), "{}", text(&output.stdout));
}

#[test]
fn convert_takes_whole_contexts() {
    let files = Files::new();
    let context = fixture("v3/tiny2x64_kf16_vf16_n64_session.bin");
    files.prints(&["convert", &context, "turned.ctx", "--v-trans", "1"]);
    let printed = files.prints(&["diff", &context, "turned.ctx"]);
    assert_eq!(
        printed,
        "no difference\nlayout alone: memory state: version: 3 | 4\nlayout alone: section 0: v_trans: false | true\n"
    );
}

#[test]
fn what_convert_cannot_do_says_why_and_leaves_the_file_that_was_there() {
    let files = Files::new();
    files.write("out.bin", b"old");
    let [slot, blob] = ["tiny2x64_kf16_vf16_n64_none.slot", "tiny2x64_kf16_vf16_n64_none.bin"].map(fixture);
    let quantized = fixture("tiny2x64_kq8_0_vq8_0_ns4u_seq1_none.slot");
    for (file, how, reason) in [
        ("absent.bin", &[][..], "open absent.bin: No such file or directory (os error 2)"),
        (&*blob, &[], "a sequence state without the header of a file; only files are converted"),
        (&slot, &["--n-rot-k", "128"], "n_rot_k: 128, which does not divide rows of 64"),
        (&slot, &["--n-rot-v", "3"], "n_rot_v: 3, which does not divide rows of 64"),
        (&quantized, &["--v-trans", "1"], "quantised V cannot be transposed"),
    ] {
        let output = files.run(&[&["convert", file, "out.bin"], how].concat());
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(file) && said.contains(reason), "{said}");
        assert_eq!(fs::read(files.path("out.bin")).unwrap(), b"old");
    }
    let output = files.run(&["convert", &slot, "absent/out.bin"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("absent"), "{}", text(&output.stderr));
    // Its checkpoints' drafts are no states.
    let output = files.run(&["convert", "slot.bin", "out.bin"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("checkpoint 0, draft: "), "{}", text(&output.stderr));
    flip_a_bit_of_a_tensor(&files, "damaged.bin");
    let output = files.run(&["convert", "damaged.bin", "out.bin"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("crc32c of the memory state"), "{}", text(&output.stderr));
    assert_eq!(fs::read(files.path("out.bin")).unwrap(), b"old");
}

/// Writes the slot file with this in its memory state.
fn flip_a_bit_of_a_tensor(files: &Files, name: &str) {
    let found = files.json(&["inspect", "slot.bin", "--json"]);
    let at = &found["state"]["sections"][0]["streams"][0]["tensors"][0]["offset"];
    files.damaged(name, usize::try_from(at.as_u64().unwrap()).unwrap());
}

// Files that are written

#[test]
fn a_picture_or_a_part_does_not_replace_the_file_that_it_is_of() {
    let files = Files::new();
    std::os::unix::fs::symlink("slot.bin", files.path("link.bin")).unwrap();
    let bytes = fs::read(files.path("slot.bin")).unwrap();
    for arguments in [
        &["inspect", "slot.bin", "--svg", "slot.bin"][..],
        &["extract", "slot.bin", "--tokens", "-o", "./slot.bin"],
        &["extract", "slot.bin", "--draft", "-o", "link.bin"],
    ] {
        let output = files.run(arguments);
        assert_eq!((output.status.code(), &output.stdout[..]), (Some(1), &b""[..]), "{arguments:?}");
        assert!(
            text(&output.stderr).ends_with(": it is the file that is read\n"),
            "{}",
            text(&output.stderr)
        );
        assert!(fs::read(files.path("slot.bin")).unwrap() == bytes);
    }
}

// extract

#[test]
fn extract_prints_the_tokens() {
    let files = Files::new();
    assert_eq!(files.prints(&["extract", "slot.bin", "--tokens"]), "-1\n1\n2\n77\n78\n");
    assert_eq!(files.json(&["extract", "slot.bin", "--tokens", "--json"]), serde_json::json!(TOKENS));
    assert_eq!(files.prints(&["extract", "slot.bin", "--tokens", "-o", "tokens.txt"]), "");
    assert_eq!(fs::read_to_string(files.path("tokens.txt")).unwrap(), "-1\n1\n2\n77\n78\n");
    let output = files.run(&["extract", &fixture("tiny2x64_kf16_vf16_n64_none.bin"), "--tokens"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).ends_with("a sequence state has no tokens\n"));
}

#[test]
fn extract_writes_a_blob_that_is_what_was_saved() {
    let files = Files::new();
    let states = checkpoint_states(&mut target());
    let extract = |arguments: &[&str]| {
        files.prints(&[&["extract", "slot.bin", "-o", "out.bin"], arguments].concat());
        fs::read(files.path("out.bin")).unwrap()
    };
    assert_eq!(extract(&["--checkpoint", "1"]), states[1].1);
    assert_eq!(extract(&["--checkpoint", "0", "--part", "draft"]), b"draft");
    assert_eq!(extract(&["--driver"]), DRIVER);
    let draft = extract(&["--draft"]);
    let found = files.json(&["inspect", "out.bin", "--json"]);
    assert_eq!((&found["kind"], &found["bytes"]), (&"sequence_state".into(), &draft.len().into()));
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = fs::metadata(files.path("out.bin")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "a state is a conversation");
    }
}

#[test]
fn extract_of_what_is_not_there_says_so_and_writes_nothing() {
    let files = Files::new();
    let plain = fixture("tiny2x64_kf16_vf16_n64_none.slot");
    for (file, what, reason) in [
        ("slot.bin", &["--checkpoint", "3"][..], "there is no checkpoint 3: the file has 3"),
        ("slot.bin", &["--checkpoint", "0", "--part", "driver"], "it is empty"),
        (&plain, &["--draft"], "the file has no draft state"),
    ] {
        let output = files.run(&[&["extract", file, "-o", "out.bin"], what].concat());
        assert_eq!(output.status.code(), Some(1), "{what:?}");
        assert!(text(&output.stderr).ends_with(&format!("{reason}\n")), "{}", text(&output.stderr));
        assert!(!files.path("out.bin").exists());
    }
    let output = files.run(&["extract", "slot.bin", "--driver", "-o", "absent/out.bin"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).starts_with("kvstate: write absent/out.bin: "), "{}", text(&output.stderr));
}

// Pipes

#[test]
fn a_pipe_that_is_closed_is_no_error() {
    // More than a pipe holds.
    let files = Files::new();
    let mut ctx = context(1, &[kv(8192)]);
    for start in (0..8192).step_by(512) {
        decode(&mut ctx, 0, (start..start + 512).step_by(2));
    }
    files.write("holes.bin", &save(&mut ctx, 0, NONE));
    let mut child = program()
        .current_dir(files.0.path())
        .args(["inspect", "holes.bin", "--json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = [0; 1];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), &*text(&output.stderr)), (Some(0), ""));
}

#[test]
fn a_bar_is_not_drawn_where_there_is_no_terminal() {
    let files = Files::new();
    // Long enough for a bar: a slot file whose unknown appendix is a hole of the disk.
    let mut bytes = fs::read(files.path("slot.bin")).unwrap();
    let found = kvstate::inspect::inspect(&bytes).unwrap();
    let start = usize::try_from(found.appendices.parts[4].1.start).unwrap();
    let mut integrity = found.appendices.integrity.unwrap();
    let hole = 300 << 20;
    let zeros = vec![0; 1 << 20];
    let crc32c = (0..hole >> 20).fold(0, |crc, _| kvstate::format::crc32c_append(crc, &zeros));
    let kind = kvstate::format::PartKind::from_magic(u32::from_le_bytes(*b"HOLE"));
    integrity.parts.push(kvstate::format::Part { kind, crc32c, len: hole });
    bytes.truncate(start);
    let path = files.write("long.bin", &bytes);
    let mut file = fs::OpenOptions::new().append(true).open(path).unwrap();
    file.set_len(start as u64 + hole).unwrap();
    std::io::Write::write_all(&mut file, &integrity.to_bytes().unwrap()).unwrap();
    assert_eq!(files.prints(&["verify", "long.bin"]), "long.bin: whole\n");
}

#[test]
fn the_readme_shows_what_is_printed() {
    let readme = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md")).unwrap();
    let block = readme.split("```console\n").nth(1).unwrap().split("```").next().unwrap();
    let (command, expected) = block.split_once('\n').unwrap();
    let arguments: Vec<_> = command.strip_prefix("$ kvstate ").unwrap().split(' ').collect();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let output = program().current_dir(folder).args(arguments).output().unwrap();
    assert_eq!(text(&output.stdout), expected);
}
