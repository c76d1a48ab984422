//! Sets `rocm_device` if the candle that the crate is compiled with has a ROCm device. No published
//! candle has one, so a feature of this crate would break `--all-features`.

fn main() {
    const VARIABLE: &str = "CANDLE_FLASH_ROCM_DEVICE";
    println!("cargo:rerun-if-env-changed={VARIABLE}");
    println!("cargo:rustc-check-cfg=cfg(rocm_device)");
    match std::env::var(VARIABLE).as_deref() {
        Ok("1") => println!("cargo:rustc-cfg=rocm_device"),
        Ok("" | "0") | Err(std::env::VarError::NotPresent) => {}
        found => panic!("{VARIABLE} is {found:?}: set it to 1 for a candle with a ROCm device, or unset it"),
    }
}
