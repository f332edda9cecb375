//! include/kvstate.h is what cbindgen makes of the sources: a change of the ABI shows in the header's diff.

use std::path::Path;

#[test]
fn the_header_checked_in_is_the_one_that_the_sources_give() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(root.join("cbindgen.toml")).expect("cbindgen.toml");
    let mut builder = cbindgen::Builder::new().with_config(config);
    for module in [
        "status",
        "ids",
        "handle",
        "kv_params",
        "recurrent",
        "dsv4",
        "sections",
        "context",
        "memory",
        "state",
        "range",
        "engine",
        "transfer_params",
        "device",
        "snapshot",
        "checkpoint",
        "fingerprint",
        "slot_file",
        "autosave",
        "view",
        "transfer",
        "slot_transfer",
        "log",
    ] {
        builder = builder.with_src(root.join(format!("src/capi/{module}.rs")));
    }
    let mut made = Vec::new();
    builder.generate().expect("cbindgen").write(&mut made);
    let made = String::from_utf8(made).expect("UTF-8");
    // cbindgen writes a negative number without the parentheses that an expression around it needs.
    let bare = "#define KVS_DEVICE_HOST -1\n";
    assert!(made.contains(bare), "KVS_DEVICE_HOST is another number, or cbindgen has learnt it");
    let made = made.replace(bare, "#define KVS_DEVICE_HOST (-1)\n");

    let path = root.join("include/kvstate.h");
    if std::env::var_os("KVSTATE_WRITE_HEADER").is_some() {
        std::fs::write(&path, &made).expect("include/kvstate.h");
    }
    let checked_in = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(made == checked_in, "include/kvstate.h is out of date: run `make header` and look at the diff");
}
