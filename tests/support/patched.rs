//! The shipped module with one thing changed in its bytes, so that what is tested is what ships and nothing in the source
//! has to know of it.

use std::path::Path;

use wasmparser::{ExternalKind, Parser, Payload, TypeRef};

/// The module at `from`, except that the exported function traps as soon as it is called.
pub fn trap_in(from: &Path, export: &str) -> Vec<u8> {
    let bytes = std::fs::read(from).unwrap();
    let (mut imported, mut exports) = (0, Vec::new());
    for payload in Parser::new(0).parse_all(&bytes) {
        match payload.unwrap() {
            Payload::ImportSection(section) => {
                let imports = section.into_imports().map(Result::unwrap);
                imported = imports
                    .filter(|import| matches!(import.ty, TypeRef::Func(_)))
                    .count();
            }
            Payload::ExportSection(section) => {
                let section = section.into_iter().map(Result::unwrap);
                let functions = section.filter(|export| export.kind == ExternalKind::Func);
                exports.extend(functions.map(|export| (export.name.to_owned(), export.index as usize)));
            }
            _ => {}
        }
    }
    let function = exports.iter().find(|(name, _)| name == export).unwrap().1;
    let names = exports.iter().filter(|(_, index)| *index == function);
    assert_eq!(names.count(), 1, "{export} shares its code with another export");

    let mut patched = bytes[..8].to_vec();
    for (id, section) in sections(&bytes) {
        patched.push(id);
        let section = match id {
            CODE_SECTION => with_body(section, function - imported, TRAP),
            _ => section.to_vec(),
        };
        put_sized(&mut patched, &section);
    }
    patched
}

/// The module at `from` as another build of the same code: with a section of its own that nobody reads.
pub fn another_build(from: &Path, mark: &str) -> Vec<u8> {
    let mut bytes = std::fs::read(from).unwrap();
    let mut section = Vec::new();
    put_sized(&mut section, b"build");
    section.extend_from_slice(mark.as_bytes());
    bytes.push(CUSTOM_SECTION);
    put_sized(&mut bytes, &section);
    bytes
}

/// The sections after the header: their ids and contents.
fn sections(bytes: &[u8]) -> Vec<(u8, &[u8])> {
    let mut sections = Vec::new();
    let mut rest = &bytes[8..];
    while let [id, tail @ ..] = rest {
        rest = tail;
        let size = take_size(&mut rest);
        sections.push((*id, &rest[..size]));
        rest = &rest[size..];
    }
    sections
}

/// A code section in which the body at `index` is another one.
fn with_body(section: &[u8], index: usize, body: &[u8]) -> Vec<u8> {
    let mut rest = section;
    let count = take_size(&mut rest);
    assert!(index < count);
    let mut patched = Vec::new();
    put_size(&mut patched, count);
    for number in 0..count {
        let size = take_size(&mut rest);
        put_sized(&mut patched, if number == index { body } else { &rest[..size] });
        rest = &rest[size..];
    }
    patched
}

/// LEB128, as the binary format has it.
fn take_size(bytes: &mut &[u8]) -> usize {
    let (mut size, mut shift) = (0, 0);
    loop {
        let byte = bytes[0];
        *bytes = &bytes[1..];
        size |= usize::from(byte & 0x7f) << shift;
        shift += 7;
        if byte < 0x80 {
            return size;
        }
    }
}

fn put_size(bytes: &mut Vec<u8>, mut size: usize) {
    while size >= 0x80 {
        bytes.push(u8::try_from(size & 0x7f).unwrap() | 0x80);
        size >>= 7;
    }
    bytes.push(u8::try_from(size).unwrap());
}

fn put_sized(bytes: &mut Vec<u8>, content: &[u8]) {
    put_size(bytes, content.len());
    bytes.extend_from_slice(content);
}

const CUSTOM_SECTION: u8 = 0;
const CODE_SECTION: u8 = 10;
/// No locals, `unreachable`, `end`.
const TRAP: &[u8] = &[0, 0x00, 0x0b];
